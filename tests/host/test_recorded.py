"""Results of a real GPU, recorded in a file, against the emulator and against the kernels' own source on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import aten_chains
import numpy as np
import pytest
import torch
from binary32 import BITS, Unary
from kernel_runs import MISSING, difference
from recording import FILE, FUNCTIONS, FunctionTable, RecordedCase, Recording, functions_of, load, same_bits

from samebits import host
from samebits.bits import Difference
from samebits.ops import OPS, by_name

RECORDER = Path(__file__).parents[1] / "gpu" / "record.py"


def needs_the_compiler(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.host(pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test))


def _as_tuple(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else value


def _emulate(case: RecordedCase, functions: Mapping[str, Unary]) -> tuple[torch.Tensor, ...]:
    chain = getattr(aten_chains, case.op)
    return _as_tuple(chain(*case.args, **functions_of(chain, functions)))


def _of_cpu(name: str) -> Unary:
    """Another approximation than the correctly rounded one: torch's on this CPU."""
    return lambda x: getattr(torch, name)(torch.from_numpy(np.asarray(x, np.float32))).numpy()


CPU = {name: _of_cpu(name) for name in FUNCTIONS}


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the file format and the recorder, with the emulator in the GPU's place ----------------------------------------


@pytest.fixture(scope="module")
def rehearsal(recorder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    def stand_in(op: str):
        chain = getattr(aten_chains, op)
        return lambda *args: chain(*args, **functions_of(chain, CPU))

    path = tmp_path_factory.mktemp("recorded") / "rehearsal.safetensors"
    references = {name: stand_in(name) for name in recorder.CASES}
    assert recorder.main(path, torch.device("cpu"), references, {"gpu": "none"}) == 0
    assert path.stat().st_size < 1_000_000
    return load(path)


def test_a_recording_gives_back_what_was_recorded(recorder: ModuleType, rehearsal: Recording) -> None:
    made = [(op, name, args) for op, make in recorder.CASES.items() for name, args, _ in make()]
    assert [case.name for case in rehearsal.cases] == [f"{op} {name}" for op, name, _ in made]
    assert len({case.name for case in rehearsal.cases}) == len(made)
    for case, (_, _, args) in zip(rehearsal.cases, made, strict=True):
        for stored, given in zip(case.args, args, strict=True):
            if isinstance(given, torch.Tensor) and given.is_floating_point():
                assert same_bits(stored, given)
            elif isinstance(given, torch.Tensor):
                assert torch.equal(stored, given)
            else:
                assert stored == given
        assert all(map(same_bits, _emulate(case, rehearsal.functions), case.outputs))
    assert rehearsal.environment == {"gpu": "none"}


def test_the_recorded_rows_tell_the_trees_apart(recorder: ModuleType, rehearsal: Recording) -> None:
    cases = {case.args[0].shape[1]: case for case in rehearsal.cases if "tree of" in case.name}
    assert tuple(cases) == recorder.TREE_ROWS
    for recorded_rows, case in cases.items():
        for rows in cases:
            same = same_bits(*(aten_chains.rms_norm_scale(*case.args, rows=n) for n in (rows, recorded_rows)))
            assert same == (rows == recorded_rows)


def test_a_root_that_was_not_recorded_is_an_error(rehearsal: Recording) -> None:
    with pytest.raises(KeyError, match="not recorded"):
        rehearsal.functions["rsqrt"](np.array([123.456], np.float32))
    case = next(case for case in rehearsal.cases if case.name == "rms_norm_scale 5x3840 bf16")
    x = case.args[0].clone()
    x.view(torch.int16)[0, 0, 0] += 64
    with pytest.raises(KeyError, match="not recorded"):
        _emulate(replace(case, args=(x, *case.args[1:])), rehearsal.functions)


def test_the_recorder_tells_when_the_emulator_or_eager_itself_differs(
    recorder: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def wrong(*args: object) -> torch.Tensor:
        y = aten_chains.rms_norm_scale(*args, rsqrt=CPU["rsqrt"])
        y.view(BITS[y.dtype]).view(-1)[-1] ^= 1
        return y

    def unsteady(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return wrong(*args) if calls == 2 else aten_chains.rms_norm_scale(*args, rsqrt=CPU["rsqrt"])

    def only(case: str) -> None:
        chosen = [made for made in original() if made[0] == case]
        recorder.CASES["rms_norm_scale"] = lambda: chosen

    original = recorder.CASES["rms_norm_scale"]
    try:
        only("2x256 fp32")
        file = tmp_path / "wrong.safetensors"
        assert recorder.main(file, torch.device("cpu"), {"rms_norm_scale": wrong}, {}) == 1
        assert "the emulator differs from eager" in capsys.readouterr().err
        assert file.exists()
        file = tmp_path / "unsteady.safetensors"
        assert recorder.main(file, torch.device("cpu"), {"rms_norm_scale": unsteady}, {}) == 1
        assert "eager differs from itself" in capsys.readouterr().err
        assert not file.exists()
    finally:
        recorder.CASES["rms_norm_scale"] = original


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "old.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"format": "0"})
    with pytest.raises(ValueError, match="expected '1'"):
        load(path)


# --- the real recording --------------------------------------------------------------------------------------------

RECORDED = load(FILE) if FILE.exists() else None
needs_recording = pytest.mark.skipif(
    RECORDED is None, reason=f"{FILE.name} is not there: run tests/gpu/record.py on a machine with a GPU"
)
CASES = RECORDED.cases if RECORDED else ()
NAMES = [case.name for case in CASES]


@needs_recording
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_emulator_gives_the_bits_of_the_gpu(case: RecordedCase) -> None:
    assert RECORDED is not None
    emulated = _emulate(case, RECORDED.functions)
    assert len(emulated) == len(case.outputs)
    assert all(map(same_bits, emulated, case.outputs))


def _run_with(tables: Mapping[str, FunctionTable], case: RecordedCase) -> Difference | None:
    with ExitStack() as stack:
        for name, table in tables.items():
            stack.enter_context(host.recorded(f"{name}f", *table.bits()))
        return difference(by_name(case.op), case.args, case.outputs)


@needs_recording
@needs_the_compiler
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_kernels_source_gives_the_bits_of_the_gpu(case: RecordedCase) -> None:
    assert RECORDED is not None
    assert _run_with(RECORDED.functions, case) is None


@needs_the_compiler
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("layer_norm_modulate 9x132 fp32", "rsqrt"),
        ("qk_norm torch 5+1x64 fp32 weight fp32", "rsqrt"),
        ("rms_norm_scale 2x256 fp32", "rsqrt"),
        ("gated_residual_norm_modulate 2x68 fp32", "rsqrt"),
        ("gated_residual_rms_norm modulated 2x256 fp32", "rsqrt"),
        ("qk_norm_rope diffusers 1+2x128 fp32 weight fp32", "rsqrt"),
        ("gelu_tanh 256 fp32", "tanh"),
        ("swiglu 256 fp32", "exp"),
    ],
)
def test_kernels_take_the_recorded_values(rehearsal: Recording, name: str, function: str) -> None:
    # The rehearsal's values are those of this CPU's torch, which are not all correctly rounded.
    table = rehearsal.functions[function]
    moved = FunctionTable(function, table.inputs, np.nextafter(table.outputs, np.float32(2)))
    case = next(case for case in rehearsal.cases if case.name == name)
    assert _run_with(rehearsal.functions, case) is None
    assert _run_with({**rehearsal.functions, function: moved}, case) is not None


@needs_the_compiler
@pytest.mark.parametrize("op", [op.name for op in OPS if op.moves_bytes])
def test_every_op_is_recorded_and_runs(rehearsal: Recording, op: str) -> None:
    cases = [case for case in rehearsal.cases if case.op == op]
    assert {t.dtype for case in cases for t in case.args[:1]} == {torch.float32, torch.float16, torch.bfloat16}
    for case in cases[:: -(-len(cases) // 6)]:  # some of them; with a GPU's own values all are run
        assert _run_with(rehearsal.functions, case) is None
