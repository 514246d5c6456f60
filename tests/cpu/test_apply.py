"""apply, the handle and its report; copies, stored models, refusal to do things twice in two ways."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoisers import (
    KernelGate,
    check_same_bits,
    eager_calls,
    fused_calls,
    one_ulp_up,
    qwen,
    qwen_inputs,
    run,
    same_bits,
    z_image,
    z_image_inputs,
)
from diffusers import QwenImageTransformer2DModel
from torch import nn

import samebits
from samebits.apply import COMPILED, NEVER_CALLED, Report, Row, apply
from samebits.errors import AlreadyAppliedError, ContractViolation, UnsupportedModelError
from samebits.gate import COMPARED, HINTED, Gate


def touched(model: nn.Module) -> list[str]:
    """The modules that hold anything that a fresh one does not."""
    return [name for name, module in model.named_modules() if {"forward", "_samebits"} & module.__dict__.keys()]


def test_the_public_name_is_the_function() -> None:
    assert samebits.apply is apply
    handle = samebits.apply(qwen())
    assert isinstance(handle, samebits.Handle)
    assert samebits.apply is apply


def test_apply_and_remove_leave_no_trace() -> None:
    model, inputs = qwen(), qwen_inputs()
    state, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    expected = run(model, inputs)
    handle = apply(model, gate=KernelGate())
    assert handle.applied
    assert touched(model)
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_modules()] == modules
    run(model, inputs)
    handle.remove()
    assert not handle.applied
    assert touched(model) == []
    counted = handle.report().to_json()
    check_same_bits(run(model, inputs), expected)
    handle.remove()
    assert handle.report().to_json() == counted


def test_context_manager_removes_also_when_something_raises() -> None:
    model = qwen()
    with pytest.raises(KeyError), apply(model) as handle:
        raise KeyError
    assert not handle.applied
    assert touched(model) == []


def test_other_instances_of_the_same_classes_are_not_touched() -> None:
    one, other = qwen(), qwen()
    with apply(one):
        assert touched(other) == []


def test_applied_twice_is_the_same_handle() -> None:
    model = qwen()
    handle = apply(model)
    assert apply(model) is handle
    assert apply(SimpleNamespace(components={"transformer": model, "vae": None})) is handle
    handle.remove()
    again = apply(model)
    assert again is not handle
    assert again.applied
    handle.remove()
    assert again.applied
    again.remove()
    assert touched(model) == []


def test_threads_that_apply_at_once_get_one_handle() -> None:
    model, handles, errors = qwen(num_layers=1), [], []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            start = threading.Barrier(3)

            def body(start: threading.Barrier = start) -> None:
                start.wait()
                try:
                    handles.append(apply(model))
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=body) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert len({id(handle) for handle in handles}) == 1
            handles.pop().remove()
            handles.clear()
            assert touched(model) == []
    finally:
        sys.setswitchinterval(interval)


def test_of_nested_blocks_the_outermost_removes() -> None:
    model = qwen()
    with apply(model) as outer:
        with apply(model) as inner, apply(model):
            assert inner is outer
        assert outer.applied
    assert not outer.applied
    assert touched(model) == []
    with apply(model) as handle, apply(model):
        handle.remove()
        assert not handle.applied


def test_applied_twice_in_two_ways_is_an_error() -> None:
    model, other = qwen(), qwen(seed=9)
    handle = apply(model)
    with pytest.raises(AlreadyAppliedError, match="with other options, another gate"):
        apply(model, gate=KernelGate())
    with pytest.raises(AlreadyAppliedError, match=r"strict=False, host=False.*remove\(\)"):
        apply(model, strict=True)
    with pytest.raises(AlreadyAppliedError):
        apply(SimpleNamespace(components={"transformer": model, "transformer_2": other}))
    assert touched(other) == []
    assert handle.applied


@pytest.mark.parametrize(
    "target", [nn.Linear(2, 2), object(), SimpleNamespace(components={"vae": nn.Linear(2, 2)}), None]
)
def test_nothing_of_a_known_family_is_an_error_that_names_the_families(target: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="QwenImageTransformer2DModel, ZImageTransformer2DModel") as caught:
        apply(target)
    assert type(target).__name__ in str(caught.value)


def test_a_pipeline_with_two_denoisers_names_both() -> None:
    first, second = qwen(), z_image()
    pipe = SimpleNamespace(components={"text_encoder": nn.Linear(2, 2), "transformer": first, "transformer_2": second})
    with apply(pipe, gate=KernelGate()) as handle:
        run(second, z_image_inputs())
        names = {row.site.split(".")[0]: row.eager + row.fused for row in handle.report().rows}
        assert names.keys() == {"transformer", "transformer_2"}
        assert handle.models == (first, second)
    assert touched(first) == touched(second) == []


def test_a_real_pipeline_is_taken_by_its_components() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    model = qwen()
    pipe = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model)
    with apply(pipe) as handle:
        assert handle.models == (model,)
        assert handle.sites[0].name == "txt_norm"


def test_a_denoiser_that_occurs_twice_is_taken_once() -> None:
    model = qwen()
    with apply(SimpleNamespace(components={"transformer": model, "transformer_2": model})) as handle:
        assert handle.models == (model,)


def test_an_error_on_the_way_takes_everything_off_again() -> None:
    class Broken(KernelGate):
        def site(self, name: str, op: Any, **options: Any) -> Any:
            if name == "norm_out":
                raise MemoryError
            return super().site(name, op, **options)

    model = qwen()
    with pytest.raises(MemoryError):
        apply(model, gate=Broken())
    assert touched(model) == []


def test_strict_and_host_reach_every_site() -> None:
    for options in ({"strict": True, "host": False}, {"strict": False, "host": True}):
        with apply(qwen(), gate=KernelGate(), **options) as handle:
            assert {(line.site.strict, line.site.host) for line in handle.sites} == {tuple(options.values())}


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_kernel_changes_nothing_but_the_report(strict: bool) -> None:
    class Wrong(KernelGate):
        def _kernel(self, op: Any) -> Any:
            right = super()._kernel(op)

            def launch(*args: Any, out: Any = None) -> Any:
                result = right(*args, out=out)
                one_ulp_up(result[0] if isinstance(result, tuple) else result)
                return result

            return launch if op.name == "layer_norm_modulate" else right

    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    with apply(model, gate=Wrong(), strict=strict) as handle:
        if strict:
            with pytest.raises(ContractViolation, match=r"transformer_blocks\.0\.img_norm1"):
                run(model, inputs)
            return
        for _ in range(3):
            check_same_bits(run(model, inputs), expected)
        rows = {row.site: row for row in handle.report().rows}
        assert rows["norm_out"].fused == 0
        assert any("1 ulp" in reason for reason in rows["norm_out"].reasons)
        assert rows["txt_norm"].fused == 2


@pytest.mark.parametrize("every", [2, 0])
def test_the_watch_takes_a_verdict_back_and_the_report_names_the_cause(every: int) -> None:
    """A kernel that turns wrong after its verdict: with the watch the picture comes back, without it never does."""
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    spoilt: list[str] = []

    class Turning(KernelGate):
        def _kernel(self, op: Any) -> Any:
            right = super()._kernel(op)

            def launch(*args: Any, out: Any = None) -> Any:
                result = right(*args, out=out)
                if op.name in spoilt:
                    one_ulp_up(result[0] if isinstance(result, tuple) else result)
                return result

            return launch

    gate = Turning()
    with apply(model, gate=gate, recheck_every=every) as handle:
        for _ in range(4):
            check_same_bits(run(model, inputs), expected)
        rechecks = handle.report().rechecks
        assert (rechecks.differed, rechecks.awaited, rechecks.revocations) == (0, 0, ())
        assert (rechecks.compared > 0) is bool(every)
        assert ("Re-checks:" in str(handle.report())) is bool(every)
        spoilt.append("layer_norm_modulate")
        results = [run(model, inputs) for _ in range(5)]
        report = handle.report()
    if not every:
        assert not any(same_bits(result, expected) for result in results)
        assert report.rechecks.differed == 0
        return
    check_same_bits(results[-1], expected)
    signatures = {(verdict.op, verdict.signature) for verdict in gate.verdicts() if verdict.revoked}
    found = report.rechecks.revocations
    assert {(revocation.op, revocation.signature) for revocation in found} == signatures != set()
    assert {revocation.op for revocation in found} == {"layer_norm_modulate"}
    assert {revocation.site for revocation in found} <= {row.site for row in report.rows}
    assert all("1 ulp apart" in revocation.cause for revocation in found)
    assert report.rechecks.differed == len(found)
    told = json.loads(json.dumps(report.rechecks.to_json()))
    assert told["revocations"] == [vars(revocation) for revocation in found]
    assert f"Re-checks: {report.rechecks.compared:,} verified calls compared again, {len(found)} differed." in str(
        report
    )
    assert all(str(revocation) in str(report) for revocation in found)


def test_recheck_every_is_an_option_like_the_others() -> None:
    model = qwen()
    with pytest.raises(ValueError, match="recheck_every must be a whole number"):
        apply(model, recheck_every=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recheck_every must be 0"):
        apply(model, recheck_every=-1)
    handle = apply(model, recheck_every=10)
    assert apply(model, recheck_every=10) is handle
    with pytest.raises(AlreadyAppliedError, match="recheck_every=10"):
        apply(model)
    handle.remove()


def test_trust_reaches_the_gate_and_verdicts_are_written_when_it_is_taken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    with apply(model, gate=KernelGate(), trust="hint") as first:
        check_same_bits(run(model, inputs), expected)
    reasons = {reason for row in first.report().rows for reason in row.reasons}
    assert COMPARED in reasons
    assert len(list((tmp_path / "certificates").glob("*.json"))) == 1
    with apply(model, gate=KernelGate(), trust="hint") as second:
        check_same_bits(run(model, inputs), expected)
    reasons = {reason for row in second.report().rows for reason in row.reasons}
    assert HINTED in reasons
    assert COMPARED not in reasons
    with apply(model, gate=KernelGate(), trust="stored") as third:
        check_same_bits(run(model, inputs), expected)
        with pytest.raises(AlreadyAppliedError, match="trust=stored"):
            apply(model, gate=third.gate)
    reasons = {reason for row in third.report().rows for reason in row.reasons}
    assert not reasons & {COMPARED, HINTED}
    for options in ({"trust": None}, {}):
        gate = KernelGate()
        with apply(model, gate=gate, **options):
            assert gate._ledger.trust is None
    with pytest.raises(ValueError, match="trust must be None or one of settings, hint, stored, anew, got 'yes'"):
        apply(model, trust="yes")


# Copies and stored models.


def test_deep_copy_of_an_applied_model_is_eager_equal_and_independent() -> None:
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    handle = apply(model, gate=KernelGate())
    other = copy.deepcopy(model)
    check_same_bits(run(other, inputs), expected)
    assert fused_calls(handle) + eager_calls(handle) == 0
    with torch.no_grad():
        other.transformer_blocks[0].attn.to_q.weight.mul_(2)
        other.norm_out.linear.weight.mul_(2)
    changed = run(other, inputs)
    assert not same_bits(changed, expected)
    check_same_bits(run(model, inputs), expected)
    own = apply(other, gate=KernelGate())
    assert own is not handle
    for _ in range(2):
        check_same_bits(run(other, inputs), changed)
    assert fused_calls(own) > 0
    own.remove()
    check_same_bits(run(other, inputs), changed)
    handle.remove()
    assert touched(model) == touched(other) == []


def test_deep_copy_of_a_pipeline_keeps_its_handle_out() -> None:
    model, inputs = z_image(), z_image_inputs()
    expected = run(model, inputs)
    holder = SimpleNamespace(components={"transformer": model})
    handle = apply(holder, gate=KernelGate())
    check_same_bits(run(copy.deepcopy(holder).components["transformer"], inputs), expected)
    assert eager_calls(handle) + fused_calls(handle) == 0


def test_pickle_of_an_applied_model_is_eager_and_equal() -> None:
    model, inputs = qwen(torch.bfloat16), qwen_inputs(torch.bfloat16)
    expected = run(model, inputs)
    with apply(model, gate=KernelGate()) as handle:
        data = pickle.dumps(model)
        check_same_bits(run(pickle.loads(data), inputs), expected)
        assert eager_calls(handle) + fused_calls(handle) == 0
    assert b"samebits.patch" not in data


def test_save_pretrained_of_an_applied_model_writes_the_same_files(tmp_path: Path) -> None:
    model, inputs = qwen(), qwen_inputs()
    model.save_pretrained(tmp_path / "plain")
    with apply(model, gate=KernelGate()):
        run(model, inputs)
        model.save_pretrained(tmp_path / "applied")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "applied").iterdir())
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "applied" / name).read_bytes()
    loaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "applied")
    check_same_bits(run(loaded, inputs), run(model, inputs))


def test_weights_loaded_and_moved_after_apply_are_the_ones_used() -> None:
    model, other, inputs = qwen(), qwen(seed=4), qwen_inputs()
    expected = run(other, inputs)
    with apply(model, gate=KernelGate()):
        assert not same_bits(run(model, inputs), expected)
        model.load_state_dict(other.state_dict())
        check_same_bits(run(model, inputs), expected)
        half = qwen_inputs(torch.bfloat16)
        nn.Module.to(model, torch.bfloat16)
        check_same_bits(run(model, half), run(nn.Module.to(other, torch.bfloat16), half))


def test_an_applied_model_that_is_dropped_is_freed() -> None:
    """A handle that nobody keeps must not keep forty gigabytes of weights alive."""
    model = qwen()
    apply(model)
    gone = weakref.ref(model)
    block = weakref.ref(model.transformer_blocks[0])
    del model
    gc.collect()
    assert gone() is None
    assert block() is None


# The report.


def test_report_counts_and_explains() -> None:
    model, inputs = qwen(), qwen_inputs()
    with apply(model, gate=Gate()) as handle:
        assert "0 of them called" in handle.report().summary
        run(model, inputs)
        run(model, inputs)
        rows = handle.report().to_json()
    assert json.loads(json.dumps(rows)) == rows
    assert len(rows) == 31
    both = [rows.pop(at) for at in reversed(range(31)) if rows[at]["site"].endswith((".norm2", ".next_norm1"))]
    assert len(both) == 3
    for row in both:
        assert (row["fused"], row["eager"], list(row["reasons"].values())) == (0, 0, [0])
        (reason,) = row["reasons"]
        assert reason.startswith("the two streams are served one by one: ")
        assert "cpu" in reason.lower()
    elsewhere = [row for row in rows if any("its lines run" in reason for reason in row["reasons"])]
    residuals, norms = (
        [f"transformer_blocks.{at}_{what}" for at in ("{}.img", "{}.txt")] for what in ("residual", "norm1")
    )
    assert [row["site"] for row in elsewhere] == [*(n.format(0) for n in residuals), *(n.format(1) for n in norms)]
    for row in elsewhere:
        assert (row["fused"], row["eager"], list(row["reasons"].values())) == (0, 0, [0])
    for row in rows:
        assert list(row) == ["site", "op", "fused", "eager", "reasons"]
        if row in elsewhere:
            continue
        assert all("cpu" in reason.lower() for reason in row["reasons"])  # no kernel runs here, and it says so
        assert sum(row["reasons"].values()) == 2
        if row["op"] == "linear_gelu_tanh":  # nobody's eager calls: the site of the activation has them
            assert (row["fused"], row["eager"]) == (0, 0)
            continue
        assert (row["fused"], row["eager"]) == (0, 2)
    assert {row["op"] for row in rows} == {
        "layer_norm_modulate",
        "gated_residual_norm_modulate",
        "gated_residual",
        "qk_norm_rope",
        "linear_gelu_tanh",
        "gelu_tanh",
        "rms_norm_scale",
        "joint_projection",
    }
    assert rows[0]["site"] == "txt_norm"
    assert rows[-1]["site"] == "norm_out"


def test_report_table_groups_what_behaved_alike() -> None:
    alike = [Row(f"blocks.{n}.norm1", "layer_norm_modulate", 30, 1, {"compared": 1}) for n in range(60)]
    odd = [Row("blocks.60.norm1", "layer_norm_modulate", 0, 31, {"a hook": 30, "compared": 1})]
    idle = [Row("norm_out", "layer_norm_modulate", 0, 0, {NEVER_CALLED: 0})]
    report = Report((*alike, *odd, *idle), ("blocks.3: left something.",))
    assert str(report).splitlines() == [
        "site             op                   sites  fused  eager  why",
        "blocks.*.norm1   layer_norm_modulate     60  1,800     60  (1)",
        "blocks.60.norm1  layer_norm_modulate      1      0     31  (2) 30, (1) 1",
        "norm_out         layer_norm_modulate      1      0      0  (3)",
        "(1) compared: 61 calls",
        "(2) a hook: 30 calls",
        f"(3) {NEVER_CALLED}",
        "blocks.3: left something.",
        "62 sites, 61 of them called: 1,800 calls fused, 91 eager.",
    ]
    full = str(Report(report.rows, full=True)).splitlines()
    assert len([line for line in full if line.startswith("blocks.")]) == 61


def test_numbers_inside_a_name_are_not_a_block_number() -> None:
    table = str(Report((Row("b.0.norm1", "op", 1, 0), Row("b.1.norm1", "op", 1, 0), Row("b.0.norm2", "op", 1, 0))))
    assert "b.*.norm1" in table
    assert "b.0.norm2" in table


def test_sites_that_were_not_reached_say_so() -> None:
    model = z_image()
    with apply(model, gate=KernelGate()) as handle:
        run(model, z_image_inputs())
        rows = {row.site: row for row in handle.report().rows}
    assert rows["siglip_embedder.0"].reasons == {NEVER_CALLED: 0}
    assert rows["layers.0.attention.qk"].eager == 1


def test_compiled_parts_say_so() -> None:
    model = qwen()
    model.transformer_blocks[0].compile(backend="eager")
    model.transformer_blocks[1] = torch.compile(model.transformer_blocks[1], backend="eager")
    with apply(model, gate=KernelGate()) as handle:
        rows = {row.site: set(row.reasons) for row in handle.report().rows}
    for block in (0, 1):
        assert rows[f"transformer_blocks.{block}.img_norm1"] == {COMPILED}
        assert rows[f"transformer_blocks.{block}.attn.qk"] == {COMPILED}
    assert rows["norm_out"] == {NEVER_CALLED}


def test_what_remove_had_to_leave_is_in_the_report() -> None:
    model, inputs = qwen(), qwen_inputs()
    expected = run(model, inputs)
    handle = apply(model, gate=KernelGate())
    inner = model.norm_out.forward
    model.norm_out.forward = lambda *args: inner(*args)
    check_same_bits(run(model, inputs), expected)
    handle.remove()
    (note,) = handle.report().notes
    assert note.startswith("norm_out: a forward that came later")
    assert note in str(handle.report())
    check_same_bits(run(model, inputs), expected)
    assert touched(model) == ["norm_out"]  # the user's own
