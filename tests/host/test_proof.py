"""The proof on the CPU: its probes agree with ATen where every machine must, and see what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from kernel_runs import needs_compiler

from samebits.bench import proofs
from samebits.cli import main
from samebits.ops import OPS, by_name
from samebits.proof import controls, page, prove, rows, trees, wrong
from samebits.proof.chains import CLIP, ONE_PLUS, PRODUCT, STEPS, SUM
from samebits.proof.controls import Control, Steps
from samebits.proof.forms import FORMS
from samebits.proof.probe import Outcome, Probes
from samebits.proof.rows import Shape
from samebits.proof.steps import BF16, FP16, FP32, Step
from samebits.proof.workshop import Change, Workshop

pytestmark = needs_compiler
CPU = torch.device("cpu")
RESIDUAL = by_name("gated_residual")
NAMES = {control.name: control for control in wrong.CONTROLS}
HARMLESS = Control("harmless", (Change("_numerics.cuh", "// ATen's `1 + a`", "// Here `1 + a`"),), Steps((SUM,), BF16))
FEW = (NAMES["the clip loses NaN"], NAMES["one ulp in one element"])


def outcome_of(step: Step, dtype: torch.dtype) -> Outcome:
    with Workshop() as workshop:
        return Probes(workshop.path, step.unit, dtype, [step], CPU).run(step, whole=False)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_portable_steps_of_one_unit_agree(dtype: torch.dtype) -> None:
    steps = [step for step in STEPS["gated_residual_norm_modulate"] if step.unit is SUM.unit and step.portable]
    with Workshop() as workshop:
        probes = Probes(workshop.path, SUM.unit, dtype, steps, CPU)
        for step in steps:
            found = probes.run(step, whole=False)
            assert (found.differ, found.first) == (0, None), step.name
            assert found.checked >= 4096


def test_another_operation_is_found_and_shown() -> None:
    found = outcome_of(replace(SUM, aten=lambda t, a, b: a * b), BF16)
    assert found.differ > found.checked / 2
    assert found.first is not None
    assert "instead of" in found.first


def test_one_wrong_value_of_65536_is_found() -> None:
    def aten(types: object, a: torch.Tensor) -> torch.Tensor:
        right = 1 + a
        right.view(torch.int16)[0, 0x3F80] ^= 1
        return right

    found = outcome_of(replace(ONE_PLUS, aten=aten), BF16)
    assert (found.checked, found.differ) == (1 << 16, 1)
    assert found.first == "a = 1 (0x3f80): 2 (0x4000) instead of 2.01562 (0x4001)"


def test_a_signed_zero_is_found() -> None:
    found = outcome_of(replace(PRODUCT, aten=lambda t, a, b: a * b + 0.0), FP32)
    assert found.differ > 0


def test_the_wrong_type_is_no_difference_but_an_error() -> None:
    with pytest.raises(TypeError, match="Correct the step's `out`"):
        outcome_of(replace(SUM, aten=lambda t, a, b: a.float() + b), BF16)


@pytest.mark.parametrize("control", [c for c in wrong.CONTROLS if c.portable], ids=lambda control: control.name)
def test_a_wrong_kernel_is_caught(control: Control) -> None:
    verdict = controls.run(control, CPU)
    assert verdict.caught is True, verdict.seen


def test_a_harmless_change_is_not_caught() -> None:
    assert controls.run(HARMLESS, CPU) == controls.Verdict("harmless", False, "nothing differs")


def test_what_only_a_gpu_can_catch_is_not_counted() -> None:
    verdict = controls.run(NAMES["lanes fold in the reversed order"], CPU)
    assert verdict.caught is None
    assert "GPU" in verdict.seen


@pytest.mark.parametrize("op", [op for op in OPS if op.moves_bytes], ids=lambda op: op.name)
def test_every_form_runs(op: object) -> None:
    """Every op's call is made and compared, whatever a CPU's eager says: nothing raises, and every row counts."""
    form = FORMS[op.name]  # type: ignore[attr-defined]
    variant = form.variants_of(BF16)[-1]
    shape = Shape(24, form.narrow[1])
    assert rows.adversarial(op, form, BF16, shape, variant, CPU, 2).checked == 48  # type: ignore[arg-type]
    assert rows.random(op, form, BF16, shape, variant, CPU, 30, 60.0).checked == 48  # type: ignore[arg-type]
    for name in form.every:
        assert rows.every_pair(op, form, name, BF16, CPU, whole=False).checked >= 1 << 16  # type: ignore[arg-type]


def test_a_case_of_an_op_is_compared() -> None:
    case = next(case for case in RESIDUAL.cases if case.rows < 100)
    assert rows.case(RESIDUAL, case, CPU, 2) == Outcome(2 * case.rows, 0)
    wrong_one = replace(RESIDUAL, reference=lambda *args: RESIDUAL.reference(*args) + 1)
    assert rows.case(wrong_one, case, CPU, 2).differ > 0


def test_the_time_limit_of_random_rows_is_kept_and_told() -> None:
    found = rows.random(RESIDUAL, FORMS[RESIDUAL.name], BF16, Shape(2, 128), "", CPU, 10**9, 0.0)
    assert 0 < found.checked < 1000
    assert found.differ == 0


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few controls and one element type: every kernel more is a compilation more."""
    monkeypatch.setattr(wrong, "CONTROLS", FEW)
    monkeypatch.setattr(prove, "dtypes_of", lambda op: [BF16])
    monkeypatch.setattr(trees, "prove_trees", lambda ops, device, quick, progress: trees.TreeProof())


@pytest.mark.usefixtures("few")
def test_a_whole_proof_its_record_and_its_page(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["prove", "gated_residual", "--shape", "3x256", "--out", str(tmp_path), "--json", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    data = proofs.read(tmp_path / "prove.json")
    assert json.loads(result.stdout) == data
    assert data["controls"] | {"each": None} == {"caught": 2, "planted": 2, "each": None}
    assert data["source"]["ops"] == {"gated_residual": RESIDUAL.source_hash}
    assert "no GPU" in data["shows"]
    kinds = {(row["step"], row["method"]) for row in data["ops"]}
    assert ("round(a + b)", "sampled") in kinds
    assert ("random rows", "random") in kinds
    assert any(row["domain"] == "3x256" and row["method"] == "adversarial" for row in data["ops"])
    html = (tmp_path / "prove.html").read_text()
    assert "There is no GPU here" in html
    assert "the clip loses NaN" in html
    assert "http" not in html.replace("http://www.w3.org", ""), "the page asks for nothing from elsewhere"


@pytest.mark.usefixtures("few")
def test_trees_join_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "op": RESIDUAL.name,
        "dtype": "float32",
        "step": "mean",
        "domain": "d",
        "checked": 3,
        "differ": 0,
        "method": "m",
    }

    def found(ops: object, device: object, quick: bool, progress: prove.Progress) -> trees.TreeProof:
        progress("a tree", 1, 2)
        return trees.TreeProof([row], [], [("a tree", "<svg></svg>")], [("another order", caught)], ["a note"])

    told: list[tuple[str, int, int]] = []
    for caught in (True, False):
        monkeypatch.setattr(trees, "prove_trees", found)
        proof = prove.prove([RESIDUAL], CPU, progress=lambda *now: told.append(now))
        assert row in proof.rows
        assert (proof.planted, proof.caught) == (3, 2 + caught)
        assert proof.good is caught
        assert list(proof.notes) == ["a note"]
        assert proof.pictures
    assert any(text == "a tree (1 of 2)" for text, _, _ in told)
    row["differ"] = 1
    caught = True
    assert not prove.prove([RESIDUAL], CPU).good


@pytest.mark.usefixtures("few")
def test_trees_that_fail_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no order was found")

    monkeypatch.setattr(trees, "prove_trees", broken)
    proof = prove.prove([RESIDUAL], CPU)
    assert not proof.good
    assert any("no order was found" in row.get("error", "") for row in proof.rows)


@pytest.mark.usefixtures("few")
def test_progress_counts_every_task() -> None:
    told: list[tuple[str, int, int]] = []
    proof = prove.prove([RESIDUAL], CPU, progress=lambda *now: told.append(now))
    assert proof.good
    total = told[0][2]
    assert [done for _, done, _ in told] == list(range(total + 1))


@pytest.mark.usefixtures("few")
def test_a_control_that_is_not_caught_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wrong, "CONTROLS", (*FEW, HARMLESS))
    result = CliRunner().invoke(main, ["prove", "gated_residual", "--out", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 1
    assert "NOT CAUGHT harmless" in result.output
    assert "2 of 3" in " ".join(result.output.split())
    assert proofs.read(tmp_path / "prove.json")["controls"]["planted"] == 3


@pytest.mark.usefixtures("few")
def test_a_step_that_differs_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    step = replace(CLIP, name="a wrong clip", aten=lambda t, a, b: (a + b).clip(-65000, 65504))
    monkeypatch.setitem(STEPS, "gated_residual", (step,))  # type: ignore[call-overload]
    result = CliRunner().invoke(main, ["prove", "gated_residual", "--device", "cpu"])
    assert result.exit_code == 1
    assert "WRONG gated_residual bfloat16 a wrong clip" in " ".join(result.output.split())


@pytest.mark.usefixtures("few")
def test_a_step_that_does_not_compile_is_told_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    step = replace(SUM, name="a broken sum", code="sum(a, nothing)", unit=replace(SUM.unit, constants=(("X", 1),)))
    monkeypatch.setitem(STEPS, "gated_residual", (step, PRODUCT))  # type: ignore[call-overload]
    proof = prove.prove([RESIDUAL], CPU)
    broken = [row for row in proof.rows if row["step"] == "a broken sum"]
    assert all("nothing" in row["error"] for row in broken)
    assert broken
    assert not proof.good
    assert all(row["checked"] for row in proof.rows if row["step"] == PRODUCT.name)


@pytest.mark.usefixtures("few")
def test_an_op_without_steps_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(RESIDUAL, name="newcomer")
    proof = prove.prove([other], CPU)
    assert not proof.good
    assert "no entry" in proof.rows[0]["error"]


def test_the_page_escapes_what_it_is_told() -> None:
    document = {
        "command": "samebits prove <b>",
        "environment": {"gpu": {"name": "Pretend 9"}, "torch": {"version": "2.99.0"}},
        "source": {"commit": "abc", "dirty": True},
        "shows": "x < y",
        "quick": True,
        "seconds": 1.5,
        "notes": ["seen only"],
        "controls": {"caught": 1, "planted": 2, "each": [{"name": "a", "caught": False, "seen": "<i>"}]},
        "ops": [
            {
                "op": "swiglu",
                "dtype": "bfloat16",
                "step": "a & b",
                "domain": "d",
                "checked": 65536,
                "differ": 1,
                "method": "exhaustive",
                "first": "<script>",
            }
        ],
    }
    html = page.render(document, [("a tree", "<svg></svg>")])
    assert "<script>" not in html
    assert "<svg></svg>" in html
    assert "65,536" in html
    assert 'class="n bad">1<' in html
    assert "Pretend 9" in html


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prove", "nothing"], "no op is called 'nothing'"),
        (["prove", "--shape", "3072"], "expected ROWSxWIDTH"),
        (["prove", "--shape", "4x7", "swiglu", "--device", "cpu"], "no op takes it"),
        (["prove", "--out", "/proc/nowhere", "--device", "cpu"], "cannot be written to"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.strip().splitlines()) == 1
