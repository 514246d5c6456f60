"""Every op declares how it is proved, no device function is forgotten, every domain is whole, every control applies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samebits.ops import OPS, by_name, gelu_tanh
from samebits.proof import coverage, values
from samebits.proof.chains import COUNTS, MEAN_FACTOR, MODULATE, ONE_PLUS, PRODUCT, ROOT, ROTATE, STEPS, SUM
from samebits.proof.domains import domain_of, draw, every_16, pieces, single_starts
from samebits.proof.forms import FORMS, Inputs
from samebits.proof.prove import dtypes_of
from samebits.proof.rows import ROW_COUNTS, Shape, adversarial_shapes, fits
from samebits.proof.steps import BF16, FP16, FP32, Step
from samebits.proof.workshop import Change, Workshop
from samebits.proof.wrong import CONTROLS

CPU = torch.device("cpu")


OURS = tuple(op for op in OPS if op.moves_bytes)
"""Products and attention are held against a library's; their cases are compared."""


def test_every_op_declares_its_steps_and_its_form() -> None:
    assert set(STEPS) == {op.name for op in OPS if not op.library}
    assert set(FORMS) == {op.name for op in OURS}
    for op in OURS:
        for dtype in dtypes_of(op):
            assert any(dtype in step.dtypes for step in STEPS[op.name]), (op.name, dtype)
            assert FORMS[op.name].variants_of(dtype), (op.name, dtype)


def test_no_device_function_is_forgotten() -> None:
    assert not coverage.uncovered(OPS)
    functions = coverage.device_functions(coverage.sources_of(OPS))
    assert set(coverage.ELSEWHERE) <= set(functions), "a name without a function"
    assert not set(coverage.ELSEWHERE) & coverage.by_steps(OPS, functions), "a step reaches it already"


def test_the_walk_finds_the_functions_that_the_text_declares() -> None:
    """Read again with another pattern: every name before a parenthesis on a line that says ``__device__``."""
    paths = coverage.sources_of(OPS)
    lines = [line for path in paths for line in path.read_text().splitlines() if "__device__" in line]
    names = {match[1] for line in lines if (match := re.search(r"(\w+)(?:<\w+>)?\(", line.split("//")[0]))}
    assert names == set(coverage.device_functions(paths))
    assert len(names) > 40


def test_a_device_function_that_nothing_reaches_is_found(tmp_path: Path) -> None:
    op = by_name("swiglu")
    source = tmp_path / "swiglu.cu"
    text = op.sources[0].read_text()
    source.write_text(text + "\n__device__ __forceinline__ float newly_added(float x) { return x; }\n")
    changed = replace(op, sources=(source, *op.sources[1:]))
    assert coverage.uncovered([changed if other is op else other for other in OPS]) == {"newly_added"}


def test_a_step_that_is_taken_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: tuple(s for s in steps if s not in ROTATE) for name, steps in STEPS.items()}
    monkeypatch.setattr(coverage, "STEPS", left)
    assert coverage.uncovered(OPS) == {"rotate"}


def _columns(step: Step, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each operand's values over the whole domain; an inner one must be the same in every piece."""
    parts = list(pieces(step, dtype, CPU, whole=True))
    columns = []
    for at, place in enumerate(step.places):
        values = [piece.operands[at].flatten() for piece in parts]
        if place == "i":
            same = [torch.equal(v.view(torch.uint8), values[0].view(torch.uint8)) for v in values]
            assert all(same)
            values = values[:1]
        columns.append(torch.cat(values))
    for piece in parts:
        assert piece.inner & (piece.inner - 1) == 0, "the probe finds operands by a shift"
        assert piece.inner * piece.outer * step.parts < 1 << 31
    return columns


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("step", [SUM, PRODUCT, MODULATE[0], ROTATE[0]], ids=lambda step: step.name)
def test_pairs_are_all_pairs(step: Step, dtype: torch.dtype) -> None:
    for column in _columns(step, dtype):
        assert torch.equal(column.view(torch.int16).sort().values, torch.arange(-32768, 32768, dtype=torch.int16))
    assert domain_of(step, dtype, whole=True).exhaustive
    assert "2^32 pairs" in domain_of(step, dtype, whole=True).said


def test_values_are_all_values() -> None:
    (column,) = _columns(ONE_PLUS, BF16)
    assert torch.equal(column.view(torch.int16), every_16(BF16, CPU).view(torch.int16))
    assert domain_of(ONE_PLUS, BF16, whole=True).exhaustive
    starts = single_starts()
    assert (starts[0], starts[-1] + starts.step) == (-(1 << 31), 1 << 31)
    assert domain_of(ROOT[0], BF16, whole=True).said == "all 2^32 fp32 values"


@pytest.mark.parametrize("step", [COUNTS, MEAN_FACTOR], ids=lambda step: step.name)
def test_counts_are_every_count(step: Step) -> None:
    (piece,) = pieces(step, FP32, CPU, whole=True)
    inner = piece.operands[1].flatten()
    assert torch.equal(inner, torch.arange(1, inner.numel() + 1, dtype=torch.int32))
    (part,) = pieces(step, FP32, CPU, whole=False)
    assert part.operands[1].max() == inner.max()
    assert not domain_of(step, FP32, whole=False).exhaustive


@pytest.mark.parametrize(
    ("step", "dtype"), [(MODULATE[-1], BF16), (SUM, FP32), (ROTATE[-1], FP16)], ids=lambda value: str(value)[:20]
)
def test_what_is_drawn_is_never_called_exhaustive(step: Step, dtype: torch.dtype) -> None:
    assert not domain_of(step, dtype, whole=True).exhaustive
    assert "draws" in domain_of(step, dtype, whole=True).said
    assert not domain_of(PRODUCT, BF16, whole=False).exhaustive


def test_fp32_sums_meet_their_negatives() -> None:
    outer, inner = (column.view(torch.int32) for column in _columns(SUM, FP32))
    assert torch.isin(inner ^ -(1 << 31), outer).sum() > 1000


def test_draws_hold_ordinary_numbers_and_any_pattern() -> None:
    drawn = draw(1 << 16, FP32, CPU, torch.Generator().manual_seed(0))
    size = drawn.abs()
    assert ((size > 2**-32) & (size < 2)).float().mean() > 0.7
    assert drawn.isnan().any()
    assert (size > 1e30).any()


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_every_control_applies(control: object) -> None:
    with Workshop(control.changes) as workshop:  # type: ignore[attr-defined]
        assert any(workshop.path.iterdir())


def test_a_control_that_does_not_apply_is_refused() -> None:
    with pytest.raises(ValueError, match="found it 0 times"):
        Workshop([Change("swiglu.cu", "no such text", "x")])
    with pytest.raises(ValueError, match="adapt the control"):
        Workshop([Change("swiglu.cu", "Element", "x")])


def test_the_names_of_the_controls_differ() -> None:
    assert len({control.name for control in CONTROLS}) == len(CONTROLS)


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_every_form_is_taken_by_its_op(op: object) -> None:
    form = FORMS[op.name]  # type: ignore[attr-defined]
    for dtype in dtypes_of(op):  # type: ignore[arg-type]
        for variant in form.variants_of(dtype):
            for shape in adversarial_shapes(form, quick=False):
                small = Shape(min(shape.rows, 48), shape.width)
                assert fits(op, form, dtype, small, variant, CPU) is None, (shape, variant)  # type: ignore[arg-type]
    shapes = list(adversarial_shapes(form, quick=False))
    assert {shape.rows for shape in shapes} >= set(ROW_COUNTS)
    assert fits(op, form, BF16, Shape(4, 37), form.variants_of(BF16)[0], CPU) is not None or op.name == "gelu_tanh"  # type: ignore[arg-type, attr-defined]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_adversarial_rows_are_what_their_names_say(dtype: torch.dtype) -> None:
    names = list(values.PATTERNS)
    tensor = values.adversarial(torch.zeros(3, 512, dtype=dtype), torch.Generator().manual_seed(1))
    row = dict(zip(names, tensor.unbind(), strict=True))
    limits = torch.finfo(dtype)
    assert row["zero variance"].unique().numel() == 1
    assert (row["subnormals"].double().abs() < limits.smallest_normal * 1.5).all()
    assert row["subnormals"].count_nonzero() > 100
    assert (row["max finite"].abs() == limits.max).all()
    assert row["signed zeros"].signbit().any()
    assert row["signed zeros"].count_nonzero() == 0
    assert row["NaN"].isnan().sum() == 1
    assert row["infinities"].isinf().any()
    squares = row["overflow inside squares"].pow(2)
    assert squares.isinf().all()
    assert (row["one huge outlier"].abs() > 1e4).sum() == 1
    big = row["sums that show their order"].double().pow(2)
    assert big.max() / big.median() > 2**20
    assert row["every magnitude"].isfinite().all()
    others = [name for name in names if name not in ("NaN", "infinities")]
    assert all(row[name].isfinite().all() for name in others)


def test_every_value_reaches_both_kernels_of_gelu() -> None:
    counts = {name: every.build(every_16(BF16, CPU)[:1])[0].numel() for name, every in FORMS["gelu_tanh"].every.items()}
    assert min(counts.values()) < gelu_tanh.TABLE_FROM <= max(counts.values())


def test_a_lone_row_meets_every_pattern() -> None:
    inputs = Inputs(FP32, CPU)
    tensor = inputs.rows(1, 1, 64)
    seen = set()
    for number in range(len(values.PATTERNS)):
        inputs.adversarial(number)
        seen.add(tuple(tensor.view(torch.int32).flatten().tolist()))
    assert len(seen) == len(values.PATTERNS)


def test_two_tensors_meet_each_other_in_every_pattern() -> None:
    count = len(values.PATTERNS)
    met = {((i + n) % count, (i + 2 * n) % count) for n in range(count) for i in range(count)}
    assert len(met) == count * count
