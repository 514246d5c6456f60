"""Chained and elementwise ops: any view is declined, or its result has the strides that eager gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_op_predicates import BF16, FP16, FP32, Arguments, Views, check_structure

from samebits.ops import OPS, by_name

DTYPES = (BF16, FP16, FP32)


def sizes(views: Views) -> tuple[int, int, torch.dtype]:
    return views.pick(1, 1, 2, 3), views.pick(1, 1, 2, 5), views.pick(*DTYPES)


def indexed(views: Views, count: int, *, modulated: bool) -> Arguments:
    """h, gate, y, with the modulation and eps after them, then the clip and perhaps an index."""
    batch, tokens, dtype = sizes(views)
    rows = views.pick(1, 2) * batch
    h, y = (views.view((batch, tokens, 8), dtype) for _ in range(2))
    gate, *modulation = (views.view((rows, 8), dtype) for _ in range(count))
    index = views.view((batch, tokens), torch.int64) if rows == 2 * batch else None
    return h, gate, y, *modulation, *((1e-6,) if modulated else ()), views.pick(True, False), index


def gated_residual(views: Views) -> Arguments:
    return indexed(views, 1, modulated=False)


def gated_residual_norm_modulate(views: Views) -> Arguments:
    return indexed(views, 3, modulated=True)


def gated_residual_rms_norm(views: Views) -> Arguments:
    batch, tokens, dtype = sizes(views)
    x, y = (views.view((batch, tokens, 128), dtype) for _ in range(2))
    shapes = ((batch, 1, 128), (batch, tokens, 128), (1, tokens, 128), (1, 1, 128))
    gate, scale = (views.view(views.pick(*shapes), dtype) if views.often() else None for _ in range(2))
    weight = torch.ones(128, dtype=dtype)
    return x, gate, y, weight, weight if scale is not None or views.often() else None, scale, 1e-5


def qk_norm_rope(views: Views) -> Arguments:
    batch, _, dtype = sizes(views)
    heads, weight = views.pick(1, 1, 3), torch.ones(32, dtype=views.pick(dtype, dtype, FP32))
    two, values = views.often(), views.often()

    def stream() -> tuple[Any, ...]:
        tokens = views.pick(1, 1, 2, 5)
        q, k, v = (views.view((batch, tokens, heads, 32), dtype) for _ in range(3))
        table = torch.ones(views.pick((tokens, 16), (batch, tokens, 16)), dtype=torch.complex64)
        return q, k, v if values and two else None, weight, weight, table

    return *stream(), *(stream() if two else (None,) * 6), 1e-6, "diffusers"


def gelu_tanh(views: Views) -> Arguments:
    batch, tokens, dtype = sizes(views)
    return (views.view(views.pick((batch, tokens, 8), (8,), (tokens, 8), (batch, 1, tokens, 8)), dtype),)


def swiglu(views: Views) -> Arguments:
    batch, tokens, dtype = sizes(views)
    shape = views.pick((batch, tokens, 8), (8,), (tokens, 8), (batch, 1, tokens, 8))
    return views.view(shape, dtype), views.view(shape, dtype)


DRAWS: dict[str, Callable[[Views], Arguments]] = {
    draw.__name__: draw
    for draw in (
        gated_residual,
        gated_residual_norm_modulate,
        gated_residual_rms_norm,
        qk_norm_rope,
        gelu_tanh,
        swiglu,
    )
}


def test_every_op_is_drawn_somewhere() -> None:
    drawn_elsewhere = {"layer_norm_modulate", "qk_norm", "rms_norm_scale"}
    assert {op.name for op in OPS} == DRAWS.keys() | drawn_elsewhere


@pytest.mark.parametrize("name", DRAWS)
def test_any_view_is_declined_or_its_result_looks_like_eagers(name: str) -> None:
    op, views, taken = by_name(name), Views(20), 0
    for _ in range(3000):
        args = DRAWS[name](views)
        if op.unsupported(*args) is None:
            taken += 1
            check_structure(op, args)
    assert 100 < taken < 2700
