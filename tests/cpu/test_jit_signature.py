"""What is read from a kernel's text, and every argument that does not fit it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebits.errors import CompileError, KernelArgumentError
from samebits.jit.kernel import BoundKernel, Kernel
from samebits.jit.signature import Parameter, kernel_names, pack_scalars, parse_parameters
from samebits.jit.source import Source, define_options

SOURCE = """
// extern "C" __global__ void commented_out(int n)
/* extern "C" __global__ void also_out(int n) */
template <class T> __device__ void helper(T* x, int n);
extern "C" __global__ void nothing() {}
extern "C" __global__ void nothing_in_c(void) {}
extern "C" __global__ void __launch_bounds__(THREADS * (2 + 1), 4)
    scale(const Element* __restrict__ x,   // (rows, WIDTH), by row
          ELEMENT *y, /* out */ INDEX const* index, const int rows,
          long long stride, unsigned n, COUNT tokens,
          float eps, double exact, bool flag, unsigned  long long big, int8_t tiny) { helper(x, 1); }
extern "C"
__global__
void last(float* __restrict__ const x) {}
"""


def parameters(name: str = "scale") -> tuple[Parameter, ...]:
    return parse_parameters(SOURCE, name, {"ELEMENT": "__half", "COUNT": "long long", "THREADS": 32})


def scalars(**changes: Any) -> dict[str, Any]:
    good = {
        "rows": 3, "stride": 1 << 40, "n": 7, "tokens": 5, "eps": 1e-6, "exact": 0.1, "flag": True,
        "big": 2**64 - 1, "tiny": -128,
    }  # fmt: skip
    return {name: value for name, value in (good | changes).items() if value is not ...}


def test_parameters_are_read_from_the_text() -> None:
    assert [(parameter.name, parameter.kind) for parameter in parameters()] == [
        ("x", "pointer"), ("y", "pointer"), ("index", "pointer"), ("rows", "int32"), ("stride", "int64"),
        ("n", "uint32"), ("tokens", "int64"), ("eps", "float32"), ("exact", "float64"), ("flag", "bool"),
        ("big", "uint64"), ("tiny", "int8"),
    ]  # fmt: skip
    assert [parameter.bytes for parameter in parameters()] == [8, 8, 8, 4, 8, 4, 8, 4, 8, 1, 8, 1]
    assert parameters()[1].c_type == "__half*"
    assert parameters("nothing") == parameters("nothing_in_c") == ()
    assert [parameter.kind for parameter in parameters("last")] == ["pointer"]


def test_kernels_in_comments_are_none() -> None:
    assert kernel_names(SOURCE) == ("nothing", "nothing_in_c", "scale", "last")


def test_a_kernel_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(CompileError, match="no extern \"C\" __global__ kernel 'helper'; it has: nothing, nothing_in_c"):
        parameters("helper")
    with pytest.raises(CompileError, match="it has: none"):
        parse_parameters("int x;", "scale", {})


@pytest.mark.parametrize("text", ["long n", "Shape shape", "float2 pair", "unsigned long n", "std::pair<int, int> p"])
def test_a_type_that_cannot_be_checked_is_refused(text: str) -> None:
    with pytest.raises(CompileError, match=r"cannot be (checked|read)"):
        parse_parameters(f'extern "C" __global__ void k({text}) {{}}', "k", {})


@pytest.mark.parametrize("text", ["int", "int n = 3", "float* x[4]", "\n#if A\nint n\n#endif\n"])
def test_a_parameter_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CompileError):
        parse_parameters(f'extern "C" __global__ void k({text}) {{}}', "k", {})


def test_slots_hold_the_bytes_that_the_kernel_reads() -> None:
    slots = pack_scalars("scale", parameters(), scalars())
    as_bytes = {name: struct.pack("<q", slot) for name, slot in slots.items()}
    assert as_bytes["rows"][:4] == struct.pack("<i", 3)
    assert as_bytes["stride"] == struct.pack("<q", 1 << 40)
    assert as_bytes["eps"][:4] == struct.pack("<f", 1e-6)
    assert as_bytes["exact"] == struct.pack("<d", 0.1)
    assert as_bytes["big"] == b"\xff" * 8
    assert as_bytes["tiny"][:1] == b"\x80"
    assert as_bytes["flag"][:1] == b"\x01"
    assert list(slots) == ["rows", "stride", "n", "tokens", "eps", "exact", "flag", "big", "tiny"]


def test_a_float_never_travels_as_a_double() -> None:
    """The regression that lost eps: the low four bytes of a double 1e-6 are another float altogether."""
    slot = pack_scalars("scale", parameters(), scalars(eps=1e-6))["eps"]
    read_by_kernel = struct.unpack("<f", struct.pack("<q", slot)[:4])[0]
    assert read_by_kernel == float(np.float32(1e-6))
    as_double = struct.unpack("<f", struct.pack("<d", 1e-6)[:4])[0]
    assert as_double != read_by_kernel


WRONG = {
    "float for int": ("rows", 3.0, "an integer from -2147483648 to 2147483647"),
    "bool for int": ("rows", True, "an integer from"),
    "numpy bool for int": ("rows", np.True_, "an integer from"),
    "string for int": ("rows", "3", "got '3' of type str"),
    "None for int": ("rows", None, "of type NoneType"),
    "array for int": ("rows", np.arange(3), "an integer from"),
    "float tensor for int": ("rows", torch.tensor(1.5), "an integer from"),
    "too large": ("rows", 1 << 31, "got 2147483648 of type int"),
    "too small": ("rows", -(1 << 31) - 1, "an integer from"),
    "negative for unsigned": ("n", -1, "an integer from 0 to 4294967295"),
    "too large for 64 bits": ("stride", 1 << 63, "an integer from"),
    "int for float": ("eps", 1, "a float (an integer is written 1.0)"),
    "bool for float": ("eps", False, "a float"),
    "string for float": ("eps", "1e-6", "a float"),
    "tensor for float": ("eps", torch.tensor(1e-6), "a float"),
    "complex for float": ("eps", 1j, "a float"),
    "out of float's range": ("eps", 1e39, "within the range of a 32-bit float"),
    "int for bool": ("flag", 1, "True or False"),
    "float for bool": ("flag", 1.0, "True or False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_that_does_not_fit_its_type(case: str) -> None:
    name, value, words = WRONG[case]
    with pytest.raises(KernelArgumentError) as caught:
        pack_scalars("scale", parameters(), scalars(**{name: value}))
    assert words in str(caught.value)
    assert (caught.value.kernel, caught.value.argument) == ("scale", name)
    assert f"{name}`" in str(caught.value), "the declaration is not quoted"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": ...}, "no value was given for rows; its scalars are: const int rows, long long stride"),
        ({"rows": ..., "eps": ...}, "no value was given for rows, eps"),
        ({"row": 3}, "there is no parameter 'row'"),
        ({"x": 4096}, "given at the launch"),
    ],
)
def test_missing_and_unknown_names(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelArgumentError, match=words):
        pack_scalars("scale", parameters(), scalars(**changes))


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_of_other_libraries_are_taken(value: Any) -> None:
    assert pack_scalars("scale", parameters(), scalars(rows=value))["rows"] == 3


@pytest.mark.parametrize("value", [np.float64(1e-6), np.float32(1e-6)])
def test_floats_of_numpy_are_taken(value: Any) -> None:
    slots = [pack_scalars("scale", parameters(), scalars(eps=eps))["eps"] for eps in (value, 1e-6)]
    assert slots[0] == slots[1]


@given(st.floats(width=32))
def test_every_float_arrives_with_its_bits(value: float) -> None:
    slot = Parameter("eps", "float", "float32").slot("k", value)
    assert struct.pack("<q", slot) == struct.pack("<f", value) + bytes(4)


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_every_integer_arrives_or_is_refused(value: int) -> None:
    for kind, size, signed in (("int64", 8, True), ("uint64", 8, False), ("int32", 4, True), ("uint32", 4, False)):
        parameter = Parameter("n", kind, kind)
        low, high = (-(1 << 8 * size - 1), 1 << 8 * size - 1) if signed else (0, 1 << 8 * size)
        if low <= value < high:
            slot = struct.pack("<q", parameter.slot("k", value))
            assert int.from_bytes(slot[:size], "little", signed=signed) == value
        else:
            with pytest.raises(KernelArgumentError):
                parameter.slot("k", value)


# ---- binding ---------------------------------------------------------------------------------------------------------


class RecordingKernel(Kernel):
    def _bind(self, grid: Any, block: Any, shared_bytes: int, template: Any) -> BoundKernel:
        return RecordingBound(self.name, template)


class RecordingBound(BoundKernel):
    def __call__(self, device_index: int, *pointers: int) -> None:
        self._check_pointers(pointers)
        self.arguments = self._arguments(pointers)


MIXED = 'extern "C" __global__ void k(int n, float* x, float eps, float* y) {}'
FIRST = 'extern "C" __global__ void k(float* x, float* y, int n, float eps) {}'


@pytest.mark.parametrize("text", [MIXED, FIRST])
def test_slots_and_pointers_stand_in_the_sources_order(text: str) -> None:
    kernel = RecordingKernel("k", parse_parameters(text, "k", {}))
    bound = kernel.bind((1, 1, 1), (32, 1, 1), eps=1.0, n=5)
    assert isinstance(bound, RecordingBound)
    bound(0, 111, 222)
    by_name = dict(zip([parameter.name for parameter in kernel.parameters], bound.arguments, strict=True))
    assert by_name == {"x": 111, "y": 222, "n": 5, "eps": 0x3F800000}


@pytest.mark.parametrize(
    ("pointers", "words"),
    [
        ((1,), "must be 2 addresses, got 1"),
        ((1, 2, 3), "got 3"),
        ((1, 2.0), "argument 'pointer 1' must be an address"),
        ((True, 2), "argument 'pointer 0'"),
        ((torch.zeros(1), 2), "of type Tensor"),
        ((None, 2), "of type NoneType"),
    ],
)
def test_pointers_are_counted_and_are_ints(pointers: Any, words: str) -> None:
    bound = RecordingKernel("k", parse_parameters(FIRST, "k", {})).bind((1, 1, 1), (32, 1, 1), eps=1.0, n=5)
    with pytest.raises(KernelArgumentError, match=words):
        bound(0, *pointers)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        ((0, 1, 1), (32, 1, 1), 0, "'grid'"),
        ((1, 65536, 1), (32, 1, 1), 0, "'grid'"),
        ((1 << 31, 1, 1), (32, 1, 1), 0, "'grid'"),
        ((1, 1), (32, 1, 1), 0, "'grid'"),
        ([1, 1, 1], (32, 1, 1), 0, "'grid'"),
        ((1, 1, 1), (1025, 1, 1), 0, "'block'"),
        ((1, 1, 1), (1, 1, 65), 0, "'block'"),
        ((1, 1, 1), (32.0, 1, 1), 0, "'block'"),
        ((1, 1, 1), (64, 32, 1), 0, "at most 1024 threads"),
        ((1, 1, 1), (32, 1, 1), -1, "'shared_bytes'"),
        ((1, 1, 1), (32, 1, 1), 1.5, "'shared_bytes'"),
    ],
)
def test_dimensions_are_checked(grid: Any, block: Any, shared: Any, words: str) -> None:
    with pytest.raises(KernelArgumentError, match=words):
        RecordingKernel("k", ()).bind(grid, block, shared)


# ---- sources ---------------------------------------------------------------------------------------------------------


def write_source(folder: Path, main: str = '#include "a.cuh"\n', **headers: str) -> Path:
    (folder / "main.cu").write_text(main)
    for name, text in headers.items():
        (folder / f"{name}.cuh").write_text(text)
    return folder / "main.cu"


def test_a_source_is_read_with_what_it_includes_in_quotes(tmp_path: Path) -> None:
    path = write_source(
        tmp_path,
        '#include <cuda_bf16.h>\n#  include "a.cuh"\n// #include "gone.cuh"\n',
        a='#pragma once\n#include "b.cuh"\n',
        b='#include "a.cuh"\n',
    )
    assert sorted(Source.read(path).headers) == ["a.cuh", "b.cuh"]


def test_the_digest_changes_with_every_text_and_not_with_the_folder(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "header", "main")]
    texts = [("x", "y"), ("x", "y"), ("x", "y "), ("x ", "y")]
    digests = []
    for folder, (main, header) in zip(folders, texts, strict=True):
        folder.mkdir()
        digests.append(Source.read(write_source(folder, f'#include "a.cuh"\n{main}', a=header)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("include", ["../a.cuh", "deep/a.cuh", "/etc/passwd"])
def test_an_include_outside_the_folder_is_refused(tmp_path: Path, include: str) -> None:
    with pytest.raises(CompileError, match="expected a file of its own folder"):
        Source.read(write_source(tmp_path, f'#include "{include}"\n'))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"missing\.cu cannot be read"):
        Source.read(tmp_path / "missing.cu")
    with pytest.raises(CompileError, match=r"a\.cuh cannot be read"):
        Source.read(write_source(tmp_path))
    (tmp_path / "a.cuh").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match=r"a\.cuh cannot be read"):
        Source.read(tmp_path / "main.cu")


def test_constants_become_sorted_defines() -> None:
    assert define_options({"WIDTH": 3072, "ELEMENT": "__nv_bfloat16"}) == ("-DELEMENT=__nv_bfloat16", "-DWIDTH=3072")


@pytest.mark.parametrize(
    "constants",
    [{"A": True}, {"A": 1.5}, {"A": None}, {"A-B": 1}, {"1A": 1}, {"": 1}, {"A": "1\n#define B"}, {"A=B": 1}, {3: 1}],
)
def test_constants_that_are_no_macros_are_refused(constants: Any) -> None:
    with pytest.raises(CompileError, match="cannot be a macro"):
        define_options(constants)
