"""One verification: run the kernel beside eager on protected inputs and compare everything it could have touched.

:func:`check` waits for the answer, :func:`observe` does not: it leaves counts and the first differing element in a few
numbers that a later call reads once the GPU has come that far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits import bits
from samebits.errors import LaunchError, SamebitsError
from samebits.ops._op import Launcher, Op, Outputs
from samebits.signature import Signature, TensorSpec

# Codes of the CUDA driver and runtime after which the context is lost, from the driver's documentation of CUresult:
# uncorrectable memory, illegal address, launch timeout, destroyed context, device assert, hardware stack error, illegal
# instruction, misaligned address, invalid address space, invalid program counter, launch failure, unknown.
STICKY_CUDA_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
_STICKY_CUDA_WORDS = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable",
    "context is destroyed",
)
MADE_UP_DRAWS = 16
"""How often at most a new signature is compared on made-up inputs."""

OUT_OF_MEMORY = "out of memory"
"""How a report sums such errors up: their messages hold sizes that differ from call to call."""
_OUT_OF_MEMORY_WORDS = ("out of memory", "can't allocate memory")

# A signalling NaN: no arithmetic instruction produces one, so what still holds this pattern was never written.
_POISON_BITS = {
    torch.bfloat16: 0xFFB7 - (1 << 16),
    torch.float16: 0xFDB7 - (1 << 16),
    torch.float32: 0xFFB7B7B7 - (1 << 32),
    torch.float64: 0xFFF7B7B7B7B7B7B7 - (1 << 64),
}
_POISON_BYTE = 0xB7


class Finding(NamedTuple):
    """What is wrong with a kernel."""

    cause: str
    difference: bits.Difference | None = None


class _Copy(NamedTuple):
    """A protected copy of one tensor argument, with the memory it came from and the memory it lives in."""

    original: Tensor
    flat: Tensor
    view: Tensor


def check(op: Op, launcher: Launcher, args: tuple[Any, ...], expected: Outputs, names: Sequence[str]) -> Finding | None:
    """Compare ``launcher`` on copies of ``args`` with ``expected``, which the reference returned for ``args``.

    Parameters
    ----------
    op : Op
        Whose reference made ``expected``.
    launcher : Launcher
        Prepared for the signature of ``args``. It sees copies with the same strides, overlap and alignment.
    args : tuple
        The arguments of the call. They are read and never written.
    expected : Tensor or tuple of Tensor
        Eager's results.
    names : sequence of str
        What the arguments are called in a message.

    Returns
    -------
    Finding or None
        ``None`` when every bit is eager's and no input was touched.
    """
    with torch.no_grad():
        copies = [protect(arg) if isinstance(arg, Tensor) else None for arg in args]
        outputs = tuple(poison(output) for output in op.allocate(*args))
        ours = [arg if copy is None else copy.view for arg, copy in zip(args, copies, strict=True)]
        result = launcher(*ours, out=outputs)
        if not _same_memory(result, outputs):
            return Finding("the kernel returned other tensors than the ones it was handed to fill")
        difference = bits.compare(result, expected)
        if difference is not None:
            again = bits.compare(op.reference(*args), expected)
            if again is not None:
                return Finding(f"the comparison is void, eager differs from itself: {again}", again)
            return Finding(_mismatch(difference, tuple(output.dtype for output in outputs)), difference)
        for name, copy in zip(names, copies, strict=True):
            if copy is not None:
                written = bits.compare(copy.flat, copy.original)
                if written is not None:
                    return Finding(f"the kernel wrote to its input {name}: {written}", written)
    return None


def observe(op: Op, launcher: Launcher, args: tuple[Any, ...], expected: Outputs, names: Sequence[str]) -> Observation:
    """Do what :func:`check` does without waiting for the GPU, and leave the answer to be read later.

    The parameters are those of :func:`check`. Eager is not run a second time where the two differ: what can be known
    later is what was computed now.
    """
    with torch.no_grad():
        copies = [protect(arg) if isinstance(arg, Tensor) else None for arg in args]
        outputs = tuple(poison(output) for output in op.allocate(*args))
        ours = [arg if copy is None else copy.view for arg, copy in zip(args, copies, strict=True)]
        result = launcher(*ours, out=outputs)
        if not _same_memory(result, outputs):
            return Observation(Finding("the kernel returned other tensors than the ones it was handed to fill"))
        later = bits.compare_later(result, expected)
        written = [
            (name, bits.compare_later(copy.flat, copy.original))
            for name, copy in zip(names, copies, strict=True)
            if copy is not None
        ]
        dtypes = tuple(output.dtype for output in outputs)
        return Observation(None, later, written, dtypes, mark(outputs[0].device))


class Observation:
    """A comparison that was made, and whose answer may still be on its way.

    Parameters
    ----------
    finding : Finding, optional
        What was found at once.
    """

    def __init__(
        self,
        finding: Finding | None,
        later: bits.Later | None = None,
        written: Sequence[tuple[str, bits.Later]] = (),
        dtypes: tuple[torch.dtype, ...] = (),
        arrived: Callable[[], bool] = lambda: True,
    ) -> None:
        self._finding, self._later, self._written, self._dtypes = finding, later, written, dtypes
        self.arrived = arrived
        """Says, without waiting, whether the answer is here."""

    def finding(self) -> Finding | None:
        """Read the answer once it has arrived: ``None`` when every bit was eager's and no input was touched."""
        if self._later is None:
            return self._finding
        difference = self._later.read()
        if difference is not None:
            return Finding(_mismatch(difference, self._dtypes), difference)
        for name, later in self._written:
            written = later.read()
            if written is not None:
                return Finding(f"the kernel wrote to its input {name}: {written}", written)
        return None


def mark(device: torch.device) -> Callable[[], bool]:
    """Return a function that says whether everything put on this thread's stream of ``device`` so far is done."""
    if device.type != "cuda":
        return lambda: True
    make: Any = torch.cuda.Event  # torch does not annotate it.
    event = make()
    event.record(torch.cuda.current_stream(device))
    done: Callable[[], bool] = event.query
    return done


def count(outputs: Outputs) -> int:
    """Return how many elements a result has."""
    return sum(output.numel() for output in ((outputs,) if isinstance(outputs, Tensor) else outputs))


def check_made_up(op: Op, launcher: Launcher, signature: Signature, elements: int) -> tuple[Finding | None, int]:
    """Compare ``launcher`` with the reference on random inputs of ``signature``, until ``elements`` were compared.

    Where memory is short for a second set of tensors, or the reference does not take random values, there is nothing to
    find here. The second thing returned is how many elements were compared.
    """
    compared = 0
    for seed in range(MADE_UP_DRAWS):
        if compared >= elements:
            break
        try:
            args = signature.rebuild(seed)
            expected = op.reference(*args)
        except Exception as error:
            if is_sticky(error):
                raise
            break
        try:
            finding = check(op, launcher, args, expected, signature.names)
        except Exception as error:
            if is_out_of_memory(error):
                break
            raise
        if finding is not None:
            return finding._replace(cause=f"on made-up inputs, {finding.cause}"), compared
        compared += count(expected)
    return None, compared


def protect(tensor: Tensor) -> _Copy:
    """Copy ``tensor`` with everything between its first and last element.

    The gaps of a strided view are copied too: then overlapping elements stay overlapping, and a kernel that
    writes between the rows is found out as well.
    """
    spec = TensorSpec.of(tensor)
    original = tensor.detach().as_strided((spec.span,), (1,), tensor.storage_offset())
    flat = spec.flat()
    flat.copy_(original)
    return _Copy(original, flat, spec.view_of(flat))


def poison(output: Tensor) -> Tensor:
    """Fill ``output`` with a pattern that no kernel computes and return it."""
    bits.integer_view(output).fill_(_pattern(output.dtype))
    return output


def _pattern(dtype: torch.dtype) -> int:
    real = dtype.to_real() if dtype.is_complex else dtype
    if real in _POISON_BITS:
        return _POISON_BITS[real]
    # Other types have no value to spare: a negative NaN for eight-bit floats, an odd number for integers.
    return 0xFF if dtype.is_floating_point else _POISON_BYTE


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether ``error`` heals by itself once memory is free."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    # A launch that needs more shared memory than there is never heals, whatever its message says.
    known = isinstance(error, RuntimeError) and not isinstance(error, SamebitsError)
    return known and any(word in words for word in _OUT_OF_MEMORY_WORDS)


def is_retryable(error: BaseException) -> bool:
    """Say whether the same call may succeed later: memory was short, or the error says so of itself."""
    return is_out_of_memory(error) or (isinstance(error, SamebitsError) and error.retryable)


def is_sticky(error: BaseException) -> bool:
    """Say whether ``error`` means that the CUDA context of this process is lost."""
    if isinstance(error, LaunchError):
        return error.sticky
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    code = getattr(error, "error_code", None)
    if isinstance(error, torch.AcceleratorError) and isinstance(code, int):
        return code in STICKY_CUDA_CODES
    words = str(error).lower()
    return "cuda" in words and any(word in words for word in _STICKY_CUDA_WORDS)


def summary(error: BaseException) -> str:
    """Return the class and the first line of an error, for a report that counts equal ones together."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _same_memory(result: Outputs, outputs: tuple[Tensor, ...]) -> bool:
    found = (result,) if isinstance(result, Tensor) else tuple(result)
    return len(found) == len(outputs) and all(
        one.data_ptr() == other.data_ptr() for one, other in zip(found, outputs, strict=True)
    )


def _mismatch(difference: bits.Difference, dtypes: tuple[torch.dtype, ...]) -> str:
    dtype = dtypes[difference.output or 0]
    pattern = _pattern(dtype) & ((1 << difference.bits_width) - 1)
    if difference.kind == "bits" and difference.actual_bits == pattern:
        return f"{difference}; the kernel never wrote that element"
    return str(difference)
