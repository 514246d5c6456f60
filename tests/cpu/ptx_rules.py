"""Reads PTX for arithmetic that could have other bits than the source spells."""

from __future__ import annotations

import re
from collections import Counter

_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.]*(?:\.[\w:]+)*)\s+([^;]*);", flags=re.MULTILINE)
_FLOAT = re.compile(r"\.(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)$")
_NARROWING = [[narrow, wide] for wide in ("f32", "f64") for narrow in ("f16", "bf16", "f16x2", "bf16x2")] + [
    ["f32", "f64"]
]
_PACKED_CONSTANTS = ("0x3f803f80U", "0x80008000U", "0x3C003C00U")
"""1.0 twice and -0.0 twice, as cuda_bf16.h and cuda_fp16.h write them: with these an FMA is a sum or a product."""

APPROXIMATE = frozenset({"rsqrt.approx.f32"})
"""Approximate instructions that ATen's kernels use by themselves."""
INSIDE_CUDA_FUNCTIONS = {
    "expf": frozenset({"ex2.approx.ftz.f32", "fma.rm.f32"}),
    "tanhf": frozenset({"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}),
}
"""What CUDA's own functions are made of and no other code may have: an approximate power of two and reciprocal, which
flush what is too small to count there, and an FMA rounded down that takes the fraction off an exponent."""


def instructions(ptx: str) -> list[tuple[str, str]]:
    """Every instruction and its operands, those inside inline assembly included."""
    text = re.sub(r"//[^\n]*", "", ptx)
    # Inline assembly puts several instructions on a line and braces around them.
    text = re.sub(r"[{}]\s*(?=\.reg|[a-z])", "\n", text).replace(";", ";\n")
    return [(match[1], " ".join(match[2].split())) for match in _INSTRUCTION.finditer(text)]


def fused(ptx: str) -> Counter[str]:
    """How many fused multiply-adds of fp32 and fp64 there are, by instruction."""
    return Counter(
        name for name, _ in instructions(ptx) if re.match(r"(fma|mad)\.", name) and re.search(r"\.f(32|32x2|64)$", name)
    )


def violations(
    ptx: str, allows_fma: bool, allowed: frozenset[str] = APPROXIMATE, *, allows_half_fma: bool = False
) -> list[str]:
    """What in this PTX is not IEEE arithmetic with the roundings that the source spells.

    Parameters
    ----------
    ptx : str
    allows_fma : bool
        Whether the kernel owes fused multiply-adds of fp32.
    allowed : frozenset of str
        Instructions that are no fault here: ATen has them as well.
    allows_half_fma : bool
        Whether the kernel's contract is a multiply-add in the element type itself.

    Returns
    -------
    list of str
        One sentence for each kind; empty where all is well.
    """
    found: dict[str, int] = Counter()
    constants: dict[str, str] = {}
    for name, operands in instructions(ptx):
        if name == "mov.b32":
            target, _, value = operands.partition(", ")
            constants[target] = value
        if name in allowed:
            continue
        parts = name.split(".")
        if "ftz" in parts:
            found[f"{name}: subnormals are flushed"] += 1
        if "approx" in parts or "full" in parts:
            found[f"{name}: approximate"] += 1
        if not _FLOAT.search(name):
            continue
        if parts[0] == "cvt" and parts[-2:] in _NARROWING and "rn" not in parts:
            found[f"{name}: not rounded to nearest"] += 1
        if parts[0] in ("add", "sub", "mul", "div", "sqrt", "rcp") and "rn" not in parts and "approx" not in parts:
            found[f"{name}: may be contracted or is not rounded to nearest"] += 1
        if parts[0] in ("fma", "mad"):
            if "rn" not in parts:
                found[f"{name}: not rounded to nearest"] += 1
            elif re.search(r"b?f16(x2)?$", name):
                values = [constants.get(operand) for operand in operands.split(",")[1:]]
                if not allows_half_fma and not any(value in _PACKED_CONSTANTS for value in values):
                    found[f"{name}: a fused multiply-add of halves"] += 1
            elif not allows_fma:
                found[f"{name}: one rounding where two are owed"] += 1
    return [f"{sentence} ({count} times)" for sentence, count in sorted(found.items())]


def own_fused(ptx: str, function: str | None, one_call: str) -> Counter[str]:
    """The fused multiply-adds of a kernel without those inside the calls of one of CUDA's functions.

    Parameters
    ----------
    ptx : str
    function : str or None
        Which function it calls.
    one_call : str
        PTX of a kernel that does nothing but call it once, for the same architecture.
    """
    own = fused(ptx)
    if function is not None:
        power = "ex2.approx.ftz.f32"  # there is one in every call
        calls, one = (Counter(name for name, _ in instructions(text))[power] for text in (ptx, one_call))
        own.subtract({name: count * calls // one for name, count in fused(one_call).items()})
    return Counter({name: count for name, count in own.items() if count})
