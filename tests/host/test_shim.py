"""The shim's own arithmetic, warps and blocks: bit for bit what CUDA defines, and a sentence where CUDA hangs."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from binary32 import fma, from_bits, to_bf16_bits, to_fp16_bits

from samebits import host, jit
from samebits.errors import CompileError, LaunchError

CPU = torch.device("cpu")
SOURCES = Path(__file__).with_name("sources")
NAN = np.uint32(0x7FFFFFFF)
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

MISSING = jit.unavailable(CPU, host=True)
pytestmark = [pytest.mark.host, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def launch(
    name: str,
    *arrays: npt.NDArray[np.generic],
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    source: str = "shim_probe.cu",
    **scalars: object,
) -> None:
    kernel = jit.compile(SOURCES / source, name, {}, CPU)
    kernel.bind(grid, block, shared_bytes, **scalars)(0, *(array.ctypes.data for array in arrays))


def elementwise(name: str, *arrays: npt.NDArray[np.generic], n: int) -> None:
    launch(name, *arrays, grid=(-(-n // 256), 1, 1), block=(256, 1, 1), n=n)


def awkward_floats() -> npt.NDArray[np.float32]:
    """Every bf16 and fp16 value, the middle between each two, and the neighbours of both; then random patterns."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = [from_bits(halves, torch.bfloat16).view(np.uint32), from_bits(halves, torch.float16).view(np.uint32)]
    middles = [values[0] | np.uint32(0x8000), values[1] | np.uint32(0x1000)]
    # fp16's subnormals are spaced 2^-24 apart, whatever the float's own exponent.
    tiny = (np.arange(2048) * 2.0**-25).astype(np.float32).view(np.uint32)
    exact = np.concatenate([*values, *middles, tiny, tiny | np.uint32(1 << 31)])
    random = np.random.default_rng(7).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    return np.concatenate([exact, exact + np.uint32(1), exact - np.uint32(1), random]).view(np.float32)


def pairs_of(values: U16, seed: int, count: int) -> tuple[U32, U32, U32]:
    """Three arrays of packed halves, drawn from ``values``."""
    drawn = np.random.default_rng(seed).choice(values, (3, 2, count)).astype(np.uint32)
    packed = drawn[:, 0] | drawn[:, 1] << np.uint32(16)
    return packed[0].copy(), packed[1].copy(), packed[2].copy()


def interesting_halves(dtype: torch.dtype) -> U16:
    """Random patterns with zeros, infinities, NaNs, subnormals and the ends of the range mixed in."""
    special = [
        0,
        1,
        2,
        0x7F,
        0x80,
        0x3FF,
        0x400,
        0x7BFF,
        0x7C00,
        0x7C01,
        0x7F7F,
        0x7F80,
        0x7FC1,
        0x7FFF,
        0x3C00,
        0x3F80,
    ]
    signs = np.array(special + [pattern | 0x8000 for pattern in special], dtype=np.uint16)
    usual = torch.randn(4096, generator=torch.Generator().manual_seed(3)).to(dtype).view(torch.int16).numpy()
    random = np.random.default_rng(5).integers(0, 1 << 16, 4096, dtype=np.uint16)
    return np.concatenate([np.tile(signs, 40), usual.view(np.uint16), random])


def with_one_nan(result: npt.NDArray[np.float32]) -> U32:
    return np.where(np.isnan(result), NAN, result.view(np.uint32))


# ---- conversions --------------------------------------------------------------------------------------------------


def test_every_half_becomes_its_float() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    from_bf16, from_fp16 = np.empty((2, 1 << 16), np.float32)
    elementwise("halves_to_float", halves, from_bf16, from_fp16, n=halves.size)
    patterns = torch.from_numpy(halves.view(np.int16))
    # bf16 is the upper half of a float, payload of a NaN included; fp16 is converted by an instruction that knows
    # one NaN.
    assert (from_bf16.view(np.uint32) == halves.astype(np.uint32) << 16).all()
    assert (from_bf16.view(np.uint32) == patterns.view(torch.bfloat16).float().numpy().view(np.uint32)).all()
    assert (from_fp16.view(np.uint32) == with_one_nan(patterns.view(torch.float16).float().numpy())).all()


@pytest.mark.parametrize(("dtype", "row"), [(torch.bfloat16, 0), (torch.float16, 1)])
def test_floats_are_rounded_to_halves_as_torch_rounds_them(dtype: torch.dtype, row: int) -> None:
    x = awkward_floats()
    rounded = np.empty((2, x.size), np.uint16)
    elementwise("float_to_halves", x, rounded[0], rounded[1], n=x.size)
    expected = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    expected = np.where(np.isnan(x), np.uint16(0x7FFF), expected)
    different = np.flatnonzero(rounded[row] != expected)
    assert not different.size, f"{different.size} differ, first {x[different[0]]!r}"


def test_truncation_would_be_found() -> None:
    """The inputs of the test above tell a rounding from a cut."""
    x = awkward_floats()
    cut = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert 0.3 < (cut != to_bf16_bits(x)).mean() < 0.7


def test_packing_puts_the_first_value_low() -> None:
    x = awkward_floats()[: 1 << 16]
    y = x[::-1].copy()
    bf16, fp16 = np.empty((2, x.size), np.uint32)
    elementwise("pack", x, y, bf16, fp16, n=x.size)
    assert (bf16 == to_bf16_bits(x) | to_bf16_bits(y).astype(np.uint32) << 16).all()
    assert (fp16 == to_fp16_bits(x) | to_fp16_bits(y).astype(np.uint32) << 16).all()


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def float_operands() -> tuple[npt.NDArray[np.float32], ...]:
    generator = np.random.default_rng(11)
    special = np.array(
        [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00001, 0x3F800000], np.uint32
    )
    special = np.concatenate([special, special | np.uint32(1 << 31)])
    grid = np.array(np.meshgrid(special, special, special)).reshape(3, -1)
    random = generator.integers(0, 1 << 32, (3, 1 << 17), dtype=np.uint32)
    usual = generator.standard_normal((3, 1 << 17)).astype(np.float32)
    # c nearly cancels a * b: there a fused and an unfused result differ most.
    usual[2] = -(usual[0] * usual[1]) * (1 + generator.integers(-2, 3, 1 << 17) * np.float32(2**-23))
    operands = np.concatenate([grid, random, usual.view(np.uint32)], axis=1).view(np.float32)
    return operands[0].copy(), operands[1].copy(), operands[2].copy()


def expected_float_arithmetic(
    a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], c: npt.NDArray[np.float32]
) -> dict[str, U32]:
    with np.errstate(all="ignore"):
        smaller, larger = np.fmin(a, b), np.fmax(a, b)
        both_zero = (a == 0) & (b == 0)
        smaller = np.where(both_zero, np.where(np.signbit(a) | np.signbit(b), np.float32(-0.0), np.float32(0)), smaller)
        larger = np.where(both_zero, np.where(np.signbit(a) & np.signbit(b), np.float32(-0.0), np.float32(0)), larger)
        results = {
            "add": a + b,
            "sub": a - b,
            "mul": a * b,
            "div": a / b,
            "fma": fma(a, b, c),
            "rcp": np.float32(1) / a,
            "sqrt": np.sqrt(a),
            "min": smaller,
            "max": larger,
        }
    return {name: with_one_nan(result) for name, result in results.items()}


def test_float_arithmetic_is_ieee_with_one_nan() -> None:
    a, b, c = float_operands()
    results = np.empty((9, a.size), np.float32)
    elementwise("float_arithmetic", a, b, c, results, n=a.size)
    for row, (name, expected) in enumerate(expected_float_arithmetic(a, b, c).items()):
        different = np.flatnonzero(results[row].view(np.uint32) != expected)
        assert not different.size, f"{name}: {different.size} differ, first {a[different[0]]!r}, {b[different[0]]!r}"


def test_an_unfused_multiply_add_would_be_found() -> None:
    a, b, c = float_operands()
    with np.errstate(all="ignore"):
        unfused = with_one_nan(a * b + c)
    assert (unfused != expected_float_arithmetic(a, b, c)["fma"]).mean() > 0.2


def test_arithmetic_does_not_depend_on_the_callers_floating_point_state() -> None:
    a = np.full(256, 1e-40, np.float32)
    results = np.empty((9, a.size), np.float32)
    assert torch.set_flush_denormal(True)
    try:
        elementwise("float_arithmetic", a, a, a, results, n=a.size)
        still_flushing = (torch.full((1,), 1e-40) + 0).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert (results[0] == a + a).all()
    assert (results[0] != 0).all()
    assert still_flushing, "the caller's own state was not put back"


HALVES = {torch.bfloat16: ("bf16_arithmetic", to_bf16_bits), torch.float16: ("fp16_arithmetic", to_fp16_bits)}


@pytest.mark.parametrize("dtype", list(HALVES))
def test_packed_arithmetic_is_one_rounding_of_the_float_result(dtype: torch.dtype) -> None:
    name, rounding = HALVES[dtype]
    count = 1 << 18
    packed = pairs_of(interesting_halves(dtype), 13, count)
    results = np.empty((4, count), np.uint32)
    elementwise(name, *packed, results, n=count)
    for shift in (0, 16):
        x, y = (from_bits((array >> shift & 0xFFFF).astype(np.uint16), dtype) for array in packed[:2])
        with np.errstate(all="ignore"):
            expected = [rounding(x + y), rounding(x - y), rounding(x * y)]
        for row, name_of_row in enumerate(("add", "sub", "mul")):
            assert ((results[row] >> shift & 0xFFFF) == expected[row]).all(), name_of_row


def exact_half(value: Fraction, dtype: torch.dtype) -> int:
    """The pattern of a non-zero rational, rounded once, to nearest, ties to even."""
    digits, smallest = (8, -133) if dtype == torch.bfloat16 else (11, -24)
    exponent = smallest
    while abs(value) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    units = round(abs(value) / Fraction(2) ** exponent)  # Python's round takes ties to even
    magnitude = float(units * Fraction(2) ** exponent)
    bits = torch.tensor([magnitude if value > 0 else -magnitude], dtype=torch.float64).to(dtype)
    return int(bits.view(torch.int16).item()) & 0xFFFF


@pytest.mark.parametrize("dtype", list(HALVES))
def test_a_fused_multiply_add_of_halves_is_one_rounding_of_the_exact_result(dtype: torch.dtype) -> None:
    name, rounding = HALVES[dtype]
    generator = torch.Generator().manual_seed(17)
    count = 4096
    x, y, z = (torch.randn(2 * count, generator=generator).to(dtype) for _ in range(3))
    # A third of the products lie in the middle between two halves, and an addend that fp32 loses decides.
    digits = 7 if dtype == torch.bfloat16 else 10
    odd = torch.randint(0, 1 << digits - 2, x[::3].shape, generator=generator) * 2 + 1
    x[::3] = ((1 + odd / 2.0**digits) * 16).to(dtype)
    y[::3] = 24.0
    z[::3] = (torch.randn(odd.shape, generator=generator).sign() * 2.0**-24).to(dtype)
    packed = [value.view(torch.int16).numpy().view(np.uint32).copy() for value in (x, y, z)]
    results = np.empty((4, count), np.uint32)
    elementwise(name, *packed, results, n=count)
    got = results[3].view(np.uint16)
    exact = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
    expected = np.array(
        [exact_half(value, dtype) if value else int(result) for value, result in zip(exact, got, strict=True)]
    )
    assert (got == expected).all()
    through_fp32 = rounding(fma(x.float().numpy(), y.float().numpy(), z.float().numpy()))
    assert (through_fp32 != expected).any(), "the inputs do not tell one rounding from two"


# ---- reciprocal square root and recorded values ---------------------------------------------------------------------


def reciprocal_roots(x: npt.NDArray[np.float32]) -> U32:
    y = np.empty_like(x)
    elementwise("reciprocal_roots", x, y, n=x.size)
    return y.view(np.uint32)


def test_rsqrt_is_correctly_rounded() -> None:
    """y is right if x lies between the squares of the reciprocals of the middles beside y: whole numbers decide."""
    mantissas = np.random.default_rng(19).integers(0, 1 << 24, 1 << 16, dtype=np.uint32)
    x = (mantissas + np.uint32(0x3F800000)).view(np.float32)  # 1 to 4, where every mantissa and parity occurs
    y = reciprocal_roots(x).view(np.float32)
    for value, root in zip(x[::16].tolist(), y[::16].tolist(), strict=True):
        below, above = np.nextafter(np.float32(root), np.float32(0)), np.nextafter(np.float32(root), np.float32(2))
        low, high = (Fraction(root) + Fraction(float(below))) / 2, (Fraction(root) + Fraction(float(above))) / 2
        assert low**2 * Fraction(value) < 1 < high**2 * Fraction(value)


def test_rsqrt_of_special_values() -> None:
    x = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0xBF800000, 0x7FC00001, 0xFFC00001, 1, 0x7FFFFF], np.uint32)
    expected = [0x7F800000, 0xFF800000, 0, NAN, NAN, NAN, NAN, 0x64B504F3, 0x5F000001]
    assert reciprocal_roots(x.view(np.float32)).tolist() == [int(value) for value in expected]


def test_recorded_values_take_the_place_of_the_hosts() -> None:
    x = np.array([1.0, 2.0, 3.0, 2.0], np.float32)
    plain = reciprocal_roots(x)
    two = int(np.float32(2).view(np.uint32))
    kernel = jit.compile(SOURCES / "shim_probe.cu", "reciprocal_roots", {}, CPU)
    with host.recorded("rsqrtf", [two, 0x3F800000], [int(plain[1]) + 1, int(plain[0])]):
        assert (reciprocal_roots(x) - plain).tolist() == [0, 1, 0, 1]
        assert kernel.library.misses("rsqrtf") == 1  # type: ignore[attr-defined]
    assert (reciprocal_roots(x) == plain).all()


@pytest.mark.parametrize(
    ("function", "inputs", "words"), [("sinf", [1], "expected one of rsqrtf"), ("rsqrtf", [1, 2], "2 inputs but 1")]
)
def test_recorded_values_are_checked(function: str, inputs: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words), host.recorded(function, inputs, [1]):
        pass


# ---- warps and blocks -----------------------------------------------------------------------------------------------


def shuffle_results() -> npt.NDArray[np.int32]:
    """PTX's definition of the four shuffles, lane by lane: the result is the source's number or the lane's own."""
    expected = np.empty((5, 32, 4, 32), np.int32)
    for power in range(5):
        width = 32 >> power
        for operand in range(32):
            for lane in range(32):
                first, last = lane // width * width, lane // width * width + width - 1
                sources = (first + operand % width, lane - operand, lane + operand, lane ^ operand)
                inside = (True, sources[1] >= first, sources[2] <= last, sources[3] <= last)
                expected[power, operand, :, lane] = [
                    source if fits else lane for source, fits in zip(sources, inside, strict=True)
                ]
    return expected


def test_shuffles_of_every_width_and_operand() -> None:
    results = np.full((5, 32, 4, 32), -1, np.int32)
    launch("shuffles", results)
    assert (results == shuffle_results()).all()


def test_parts_of_a_warp_go_their_own_ways() -> None:
    results = np.empty(64, np.int32)
    launch("split_warps", results, block=(64, 1, 1))
    lanes = np.arange(32)
    value = np.where(lanes < 16, lanes + (lanes ^ 1), 0)
    upper = lanes - (lanes ^ 8)
    value = np.where(lanes < 16, value, upper + upper[lanes ^ 2])
    assert (results.reshape(2, 32) == value + 1000 * value[::-1] + 100000 * 16).all()


def test_shuffles_carry_16_32_and_64_bits() -> None:
    x = np.random.default_rng(23).standard_normal(32).astype(np.float32)
    wide, narrow, pairs = np.empty(32, np.float64), np.empty(32, np.uint16), np.empty(32, np.uint32)
    launch("shuffle_types", x, wide, narrow, pairs)
    lanes = np.arange(32)
    assert (wide == x.astype(np.float64)[np.where(lanes + 5 < 32, lanes + 5, lanes)] / 3).all()
    assert (narrow == to_fp16_bits(x)[lanes ^ 3]).all()
    source = np.where(lanes >= 7, lanes - 7, lanes)
    assert (pairs == (to_bf16_bits(x) | to_bf16_bits(-x).astype(np.uint32) << 16)[source]).all()


def block_sums(x: npt.NDArray[np.float32], rounds: int) -> npt.NDArray[np.float32]:
    """The kernel's tree in numpy."""
    totals = np.zeros(x.shape[0], np.float32)
    for number in range(rounds):
        sums = (x * np.float32(number + 1))[:, ::-1].reshape(-1, 8, 32)
        for offset in (16, 8, 4, 2, 1):
            sums = sums[..., :offset] + sums[..., offset : 2 * offset]
        for warp in range(8):
            totals = totals + sums[:, warp, 0]
    return totals


@pytest.mark.parametrize(("order", "workers"), [(0, 1), (1, 1), (2, 1), (12345, 2), (0, 3)])
def test_a_block_reduction_gives_the_same_bits_under_every_schedule(order: int, workers: int) -> None:
    x = np.random.default_rng(29).standard_normal((37, 256)).astype(np.float32)
    y = np.full(37, np.nan, np.float32)
    with host.schedule(order, workers):
        launch("block_sum", x, y, grid=(37, 1, 1), block=(64, 4, 1), shared_bytes=1024, rounds=3)
    assert (y.view(np.uint32) == block_sums(x, 3).view(np.uint32)).all()
    assert (y.view(np.uint32) != (3 * 2 * x.sum(1)).astype(np.float32).view(np.uint32)).any(), "any tree would do"


def test_a_missing_barrier_shows_under_another_schedule() -> None:
    ascending, descending = np.empty((2, 32), np.int32)
    launch("missing_barrier", ascending, source="faults.cu", salt=100)
    with host.schedule(order=1):
        launch("missing_barrier", descending, source="faults.cu", salt=200)
    assert ascending[1:].tolist() == list(range(100, 131))
    assert not (descending[1:] == np.arange(200, 231)).any()


@pytest.mark.parametrize(("order", "workers"), [(-1, 1), (0, 0)])
def test_a_schedule_is_checked(order: int, workers: int) -> None:
    with pytest.raises(ValueError, match="order must be 0 or more"), host.schedule(order, workers):
        pass


def test_threads_that_returned_are_not_waited_for() -> None:
    results = np.full(64, -1, np.int32)
    launch("early_return", results, block=(64, 1, 1), keep=40)
    assert (results == np.where(np.arange(64) < 40, 39, -1)).all()


def test_every_thread_knows_its_place() -> None:
    grid, block = (3, 2, 2), (4, 3, 2)
    threads, blocks = np.empty((2, 12, 24, 3), np.uint32)
    sizes = np.empty((2, 3), np.uint32)
    launch("where", threads, blocks, sizes, grid=grid, block=block)

    def places(size: tuple[int, int, int]) -> npt.NDArray[np.int64]:
        return np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).transpose(2, 1, 0, 3).reshape(-1, 3)

    assert (threads == places(block)).all()
    assert (blocks == places(grid)[:, None]).all()
    assert sizes.tolist() == [list(grid), list(block)]


@pytest.mark.parametrize("workers", [1, 4])
def test_atomics_count_over_all_blocks(workers: int) -> None:
    counter, wide, total = np.zeros(1, np.int32), np.zeros(1, np.uint64), np.zeros(1, np.float32)
    with host.schedule(workers=workers):
        launch("count", counter, wide, total, grid=(50, 1, 1), block=(64, 1, 1))
    assert (int(counter[0]), int(wide[0]), float(total[0])) == (3200, 3200 << 33, 1600.0)


def test_arguments_of_every_type_arrive() -> None:
    out, big = np.empty(9, np.float64), np.empty(2, np.uint64)
    scalars = {"b": True, "c": -128, "uc": 255, "s": -32768, "us": 65535, "i": -(2**31), "u": 2**32 - 1}
    launch("arguments", out, big, block=(1, 1, 1), l=-(2**63), ul=2**64 - 1, f=0.1, d=0.1, **scalars)
    assert out.tolist() == [1, -128, 255, -32768, 65535, -(2**31), 2**32 - 1, float(np.float32(0.1)), 0.1]
    assert big.tolist() == [2**63, 2**64 - 1]


def test_shared_memory_starts_as_garbage() -> None:
    out = np.zeros(32, np.float32)
    launch("reads_unwritten", out, shared_bytes=128, source="faults.cu")
    assert np.isnan(out).all()


# ---- faults ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "half_a_warp_at_a_barrier": "wait for each other for ever: 16 at __syncthreads, 16 at a warp operation",
    "lane_returned": "waits for lane 3, which has returned",
    "lane_returns_late": "waits for lane 31, which has returned",
    "masks_differ": "the masks must be equal",
    "widths_differ": "must meet at one operation",
    "kinds_differ": "must meet at one operation",
    "not_named": "mask 0x0000ffff, which does not name it",
    "reads_unnamed": "reads lane 16, which the mask 0x0000ffff does not name",
    "odd_width": "power of two up to 32, got 24",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_sentence_and_not_a_hang(name: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(FAULTS[name])) as caught:
        launch(name, np.zeros(32, np.int32), source="faults.cu")
    assert not caught.value.sticky
    assert "block (0, 0, 0)" in str(caught.value)


def test_a_lane_that_the_block_does_not_have() -> None:
    with pytest.raises(LaunchError, match="lane 20, which the block does not have"):
        launch("lane_missing", np.zeros(20, np.int32), block=(20, 1, 1), source="faults.cu")


def test_a_write_past_the_dynamic_shared_memory_is_found() -> None:
    with pytest.raises(LaunchError, match="byte 128 of dynamic shared memory was written, but a block has only 128"):
        launch("shared_overflow", np.zeros(32, np.int32), shared_bytes=128, source="faults.cu")
    launch("shared_overflow", np.zeros(32, np.int32), shared_bytes=132, source="faults.cu")


def test_a_stack_overflow_is_found() -> None:
    with pytest.raises(LaunchError, match="needs more than 131072 bytes of stack"):
        launch("deep_stack", np.zeros(1, np.int32), block=(1, 1, 1), source="faults.cu", depth=48 << 10)


def test_more_shared_memory_than_any_gpu_has() -> None:
    with pytest.raises(LaunchError, match="no GPU has more than 232448"):
        launch("shared_overflow", np.zeros(32, np.int32), shared_bytes=232449, source="faults.cu")


def test_a_kernel_runs_again_after_a_fault() -> None:
    with pytest.raises(LaunchError):
        launch("shared_overflow", np.zeros(32, np.int32), shared_bytes=128, source="faults.cu")
    out = np.zeros(32, np.int32)
    launch("shared_overflow", out, shared_bytes=132, source="faults.cu")
    assert out.tolist() == [-1] + [1] * 31


# ---- the compiler ---------------------------------------------------------------------------------------------------


def test_two_names_for_dynamic_shared_memory_are_refused() -> None:
    with pytest.raises(CompileError, match="one and other; the host toolchain knows one name"):
        jit.compile(SOURCES / "two_names.cu", "two_names", {}, CPU)


def test_a_kernel_that_the_constants_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "optional.cu"
    path.write_text(
        '#if BOTH\nextern "C" __global__ void one(int* out) { out[0] = 1; }\n#endif\n'
        'extern "C" __global__ void other(int* out) { out[0] = 2; }\n'
    )
    with pytest.raises(CompileError, match="kernel one is left out"):
        jit.compile(path, "one", {"BOTH": 0}, CPU)
    out = np.zeros(1, np.int32)
    jit.compile(path, "other", {"BOTH": 0}, CPU).bind((1, 1, 1), (1, 1, 1))(0, out.ctypes.data)
    assert out[0] == 2
    jit.compile(path, "one", {"BOTH": 1}, CPU).bind((1, 1, 1), (1, 1, 1))(0, out.ctypes.data)
    assert out[0] == 1


def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void broken(int* out) { out[0] = no_such_name; }\n')
    with pytest.raises(CompileError, match="no_such_name") as caught:
        jit.compile(path, "broken", {}, CPU)
    assert (caught.value.kernel, caught.value.target.split()[:2]) == ("broken", ["this", "CPU"])


def test_a_plain_product_and_sum_are_not_contracted() -> None:
    a, b, c = (operand[-(1 << 10) :].copy() for operand in float_operands())
    y = np.empty_like(a[:1024])
    kernel = jit.compile(SOURCES / "contracts.cu", "multiply_add", {}, CPU)
    kernel.bind((1, 1, 1), (1024, 1, 1))(0, *(array.ctypes.data for array in (a, b, c, y)))
    assert (y.view(np.uint32) == (a * b + c).view(np.uint32)).all()
    assert (y.view(np.uint32) != fma(a, b, c).view(np.uint32)).any()


def test_without_a_compiler_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler was found (looked for g++, clang++, c++)" in str(host.unavailable())
    with pytest.raises(CompileError, match="no C\\+\\+ compiler was found"):
        host.find_compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "the C++ compiler that CXX names, 'no-such-compiler'" in str(host.unavailable())
