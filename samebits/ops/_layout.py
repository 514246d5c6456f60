"""Where rows lie in memory, and how many of them a call has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

HERE = Path(__file__).parent

CTYPES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int32: "int",
    torch.int64: "long long",
}
"""The C++ type of an element."""

MAX_ROWS = 2**31 - 1

CONTIGUOUS = torch.contiguous_format
"""``torch.empty_like(x, memory_format=CONTIGUOUS)`` takes half as long on the host as ``torch.empty`` of x's shape,
and that counts in a launch."""


@dataclass(frozen=True)
class RowLayout:
    """Rows as samples of tokens: row ``r`` starts at ``r // tokens * sample_stride + r % tokens * token_stride``."""

    samples: int
    tokens: int
    sample_stride: int
    token_stride: int

    @property
    def rows(self) -> int:
        return self.samples * self.tokens


def row_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> RowLayout | None:
    """Fold the dimensions before the last one into samples and tokens.

    Returns ``None`` where their strides need more than two steps. Dimensions of length one fold into anything.
    """
    folded: list[tuple[int, int]] = []
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        if length == 1:
            continue
        if folded and folded[-1][1] == length * stride:
            folded[-1] = (folded[-1][0] * length, stride)
        else:
            folded.append((length, stride))
    if len(folded) > 2:
        return None
    folded = [(1, 0)] * (2 - len(folded)) + folded
    (samples, sample_stride), (tokens, token_stride) = folded
    return RowLayout(samples, tokens, sample_stride, token_stride)


def in_order(x: torch.Tensor) -> bool:
    """Say whether each dimension steps past the last of the next one. Repeated (expanded) dimensions fit anywhere.

    Dimensions of length one count as well: eager orders the strides of a result by all of them.
    """
    steps = [(length, stride) for length, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return all(
        outer >= inner if length == 1 else outer > (length - 1) * inner
        for (_, outer), (length, inner) in pairwise(steps)
    )


def gives_contiguous_output(x: torch.Tensor) -> bool:
    """Say whether eager's elementwise results on ``x`` are contiguous."""
    return 0 not in x.stride() and in_order(x)


def aligned(x: torch.Tensor, elements: int) -> bool:
    """Say whether every row of ``x`` starts at a multiple of ``elements`` elements in memory."""
    size = elements * x.element_size()
    strides = [s for length, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if length > 1]
    return x.data_ptr() % size == 0 and all(s % elements == 0 for s in strides)


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; a CPU stands for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def no_overlap(x: torch.Tensor) -> bool:
    """Say whether no two elements of ``x`` share memory (expanded tensors do)."""
    return all(stride > 0 for length, stride in zip(x.shape, x.stride(), strict=True) if length > 1)


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int, amplitude: float = 1.0
) -> torch.Tensor:
    """Return normal numbers times ``amplitude``; the same seed gives the same values on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * amplitude).to(dtype)
