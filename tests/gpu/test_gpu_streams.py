"""A thousand launches over four streams: one hash. A result that moves is a race."""

from __future__ import annotations

import pytest
import torch
from ring import modulate_args, qk_args, randn, rms_args

from samebits.bench.comparing import as_tuple
from samebits.bench.inputs import poison
from samebits.bits import integer_view
from samebits.ops import OPS, Args, Op, by_name

pytestmark = pytest.mark.gpu

STREAMS, LAUNCHES = 4, 250


def args_of(op: Op, device: torch.device) -> Args:
    """A case of the op's record with some hundred rows, or the smallest of those that are timed."""
    if op.name == "qk_norm":
        qkv = randn(1, 512, 3 * 24 * 128, dtype=torch.bfloat16, device=device)
        q, k, _ = (part.unflatten(-1, (24, 128)) for part in qkv.chunk(3, -1))
        return qk_args(q, k, "diffusers")
    if op.name in ("layer_norm_modulate", "rms_norm_scale"):
        make = modulate_args if op.name == "layer_norm_modulate" else rms_args
        return make(randn(1, 512, 3072, dtype=torch.bfloat16, device=device))
    return min((case for case in op.cases if case.name in op.headline), key=lambda case: case.rows).build(device, 0)


@pytest.mark.parametrize("name", [op.name for op in OPS])
def test_one_hash_over_a_thousand_launches_on_four_streams(name: str, device: torch.device) -> None:
    op = by_name(name)
    args = args_of(op, device)
    expected = [integer_view(t) for t in as_tuple(op.reference(*args))]
    launcher = op.prepare(*args)
    outputs = [op.allocate(*args) for _ in range(STREAMS)]
    moved = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(STREAMS)]
    streams = [torch.cuda.Stream(device) for _ in range(STREAMS)]
    torch.cuda.synchronize()
    for _ in range(LAUNCHES):
        for stream, out, count in zip(streams, outputs, moved, strict=True):
            with torch.cuda.stream(stream):
                poison(out)
                launcher(*args, out=out)
                for ours, eager in zip(out, expected, strict=True):
                    count += (integer_view(ours) != eager).sum()
    torch.cuda.synchronize()
    assert [int(count) for count in moved] == [0] * STREAMS
    # the negative control: the same comparison sees one changed bit
    integer_view(outputs[0][0]).view(-1)[7] ^= 1
    assert int((integer_view(outputs[0][0]) != expected[0]).sum()) == 1
