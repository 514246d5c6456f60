"""Every kernel compiles for every architecture, and its PTX is read: each rounding is one that the source spells."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ptx_rules import APPROXIMATE, INSIDE_CUDA_FUNCTIONS, fused, instructions, own_fused, violations

from samebits import jit
from samebits.errors import CompileError
from samebits.jit import nvrtc
from samebits.jit.source import Source
from samebits.ops import OPS

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
CONTRACTING = tuple(flag.replace("--fmad=false", "--fmad=true") for flag in nvrtc.FLAGS)

try:
    KNOWN, MISSING = nvrtc.supported_architectures(), ""
except CompileError as error:
    KNOWN, MISSING = (), str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


COMPILED = [op for op in OPS if not op.library]


def variants() -> Iterator[Any]:
    for op in COMPILED:
        (path,) = [path for path in op.sources if path.suffix == ".cu"]
        module = importlib.import_module(f"samebits.ops.{op.name}")
        for name, constants, allows_fma in module.COMPILE_VARIANTS:
            label = "-".join([op.name, name, *(str(value) for value in constants.values())])
            function = getattr(module, "CUDA_FUNCTION", None)
            for architecture in op.architectures or ARCHITECTURES:
                yield pytest.param(
                    path, name, constants, allows_fma, function, architecture, id=f"{label}-{architecture}"
                )


def compiled(path: Path, name: str, constants: Any, architecture: str, flags: Any = nvrtc.FLAGS) -> tuple[bytes, str]:
    if int(architecture.removeprefix("sm_").removesuffix("a")) not in KNOWN:
        pytest.skip(f"NVRTC {nvrtc.version()} does not know {architecture}")
    return nvrtc.compile_source(Source.read(path), name, constants, architecture, flags)


@pytest.mark.parametrize(("path", "name", "constants", "allows_fma", "function", "architecture"), list(variants()))
def test_every_rounding_is_one_that_the_source_spells(
    path: Path, name: str, constants: Any, allows_fma: bool, function: str | None, architecture: str, tmp_path: Path
) -> None:
    cubin, ptx = compiled(path, name, constants, architecture)
    assert cubin.startswith(b"\x7fELF")
    assert f".entry {name}(" in ptx
    assert f".target {architecture}" in ptx
    inside = INSIDE_CUDA_FUNCTIONS[function] if function else frozenset()
    native = bool(constants.get("NATIVE_FMA"))
    assert violations(ptx, allows_fma or bool(function), APPROXIMATE | inside, allows_half_fma=native) == []
    assert inside <= {instruction for instruction, _ in instructions(ptx)}, "an exception that is not needed"
    own = own_fused(ptx, function, call_of(tmp_path, function, architecture) if function else "")
    assert bool(own) == allows_fma, "the variant's third element does not say what its kernel does"
    # Told to contract, the compiler finds nothing to contract: no product and sum is left to it.
    assert fused(compiled(path, name, constants, architecture, CONTRACTING)[1]) == fused(ptx)


def test_every_op_names_its_variants() -> None:
    for op in COMPILED:
        module = importlib.import_module(f"samebits.ops.{op.name}")
        (path,) = [path for path in op.sources if path.suffix == ".cu"]
        compiled_kernels = {name for name, _, _ in module.COMPILE_VARIANTS}
        assert compiled_kernels == set(jit.signature.kernel_names(path.read_text())), op.name
        if op.is_product:  # of bf16 alone
            continue
        elements = {constants["ELEMENT"] for _, constants, _ in module.COMPILE_VARIANTS}
        assert elements == {"__nv_bfloat16", "__half", "float"}, op.name


# ---- the reader itself: what it must find ----------------------------------------------------------------------------

HEAD = (
    "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    'extern "C" __global__ void k(float* x, __nv_bfloat162* b, __half2* h) {'
)
PLAIN = "x[0] = x[1] * x[2] + x[3];"


def read(tmp_path: Path, body: str, *flags: str, architecture: str = "sm_90", allows_fma: bool = False) -> list[str]:
    path = tmp_path / "control.cu"
    path.write_text(f"{HEAD} {body} }}\n")
    return violations(compiled(path, "k", {}, architecture, flags or nvrtc.FLAGS)[1], allows_fma)


WRONG = {
    "a contracted product and sum": (PLAIN, CONTRACTING, "fma.rn.f32: one rounding where two are owed"),
    "plain operators that may be contracted later": ("x[0] = x[1] * x[2];", CONTRACTING, "mul.f32: may be contracted"),
    "an FMA that is spelled": ("x[0] = __fmaf_rn(x[1], x[2], x[3]);", (), "fma.rn.f32: one rounding where two"),
    "fast division": ("x[0] = __fdividef(x[1], x[2]);", (), "div.approx.f32: approximate"),
    "imprecise division": (
        "x[0] = x[1] / x[2];",
        tuple(flag.replace("div=true", "div=false") for flag in nvrtc.FLAGS),
        "div.full.f32: approximate",
    ),
    "imprecise square root": (
        "x[0] = sqrtf(x[1]);",
        tuple(flag.replace("sqrt=true", "sqrt=false") for flag in nvrtc.FLAGS),
        "sqrt.approx.f32: approximate",
    ),
    "flushed subnormals": (
        "x[0] = x[1] + x[2];",
        tuple(flag.replace("ftz=false", "ftz=true") for flag in nvrtc.FLAGS),
        "add.rn.ftz.f32: subnormals are flushed",
    ),
    "a fast exponential": ("x[0] = __expf(x[1]);", (), "ex2.approx.f32: approximate"),
    "a sum rounded down": ("x[0] = __fadd_rd(x[1], x[2]);", (), "add.rm.f32: may be contracted or is not rounded"),
    "a conversion rounded to zero": ("h[0].x = __float2half_rz(x[0]);", (), "cvt.rz.f16.f32: not rounded to nearest"),
    "an FMA of bf16": ("b[0] = __hfma2(b[1], b[2], b[3]);", (), "fma.rn.bf16x2: a fused multiply-add of halves"),
    "an FMA of fp16": ("h[0] = __hfma2(h[1], h[2], h[3]);", (), "fma.rn.f16x2: a fused multiply-add of halves"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arithmetic_is_found(tmp_path: Path, case: str) -> None:
    body, flags, sentence = WRONG[case]
    found = read(tmp_path, body, *flags)
    assert any(line.startswith(sentence) for line in found), found


def call_of(tmp_path: Path, function: str, architecture: str) -> str:
    """The PTX of a kernel that does nothing but call one of CUDA's functions."""
    path = tmp_path / f"{function}.cu"
    path.write_text(f"{HEAD} x[0] = {function}(x[1]); }}\n")
    return compiled(path, "k", {}, architecture)[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("function", INSIDE_CUDA_FUNCTIONS)
def test_what_is_inside_cudas_own_functions(function: str, architecture: str, tmp_path: Path) -> None:
    ptx = call_of(tmp_path, function, architecture)
    inside = INSIDE_CUDA_FUNCTIONS[function]
    assert {sentence.split(":")[0] for sentence in violations(ptx, allows_fma=True)} == inside
    assert violations(ptx, True, APPROXIMATE | inside) == []
    assert not own_fused(ptx, function, ptx)


def test_an_fma_beside_a_call_is_found(tmp_path: Path) -> None:
    path = tmp_path / "beside.cu"
    path.write_text(f"{HEAD} x[0] = __fmaf_rn(expf(x[1]), x[2], expf(x[3])); }}\n")
    own = own_fused(compiled(path, "k", {}, "sm_90")[1], "expf", call_of(tmp_path, "expf", "sm_90"))
    assert own == {"fma.rn.f32": 1}


RIGHT = {
    "the same product and sum, uncontracted": PLAIN,
    "spelled roundings": "x[0] = __fadd_rn(__fmul_rn(x[1], x[2]), __fdiv_rn(x[3], x[4]));",
    "a reciprocal square root": "x[0] = rsqrtf(x[1]);",
    "packed bf16": "b[0] = __hadd2_rn(__hmul2_rn(b[1], b[2]), b[3]);",
    "packed fp16": "h[0] = __hsub2_rn(__hmul2_rn(h[1], h[2]), h[3]);",
    "conversions": "b[0] = __floats2bfloat162_rn(x[1], x[2]); h[0].x = __float2half_rn(__half2float(h[1].y));",
}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", RIGHT)
def test_right_arithmetic_passes(tmp_path: Path, case: str, architecture: str) -> None:
    assert read(tmp_path, RIGHT[case], architecture=architecture) == []


def test_an_fma_that_is_owed_passes(tmp_path: Path) -> None:
    assert read(tmp_path, "x[0] = __fmaf_rn(x[1], x[2], x[3]);", allows_fma=True) == []


def test_instructions_are_read_out_of_inline_assembly() -> None:
    ptx = (
        "@%p1 add.rn.f32 \t%f1, %f2, %f3; // add.f32\n"
        "{.reg .b32 c;\n  mov.b32 c, 0x3f803f80U;\n fma.rn.bf16x2 %r1,%r2,c,%r3;}"
    )
    assert [name for name, _ in instructions(ptx)] == ["add.rn.f32", "mov.b32", "fma.rn.bf16x2"]


def test_ptx_and_cubin_come_without_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text(f"{HEAD} {PLAIN} }}\n")
    if 90 in KNOWN:
        assert ".entry k(" in jit.compile_to_ptx(path, "k", {}, "sm_90")
        assert jit.compile_to_cubin(path, "k", {}, "sm_90").startswith(b"\x7fELF")
    with pytest.raises(CompileError, match="invalid value for --gpu-architecture"):
        jit.compile_to_ptx(path, "k", {}, "sm_1")
