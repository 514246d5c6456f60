"""The ops: one pair of files each, a reference in eager and a kernel that gives its bits."""

from __future__ import annotations

from samebits.ops import (
    attention,
    bias_gated_residual,
    bias_gated_residual_norm_modulate,
    gated_residual,
    gated_residual_norm_modulate,
    gated_residual_rms_norm,
    gelu_tanh,
    joint_projection,
    layer_norm_modulate,
    linear_gelu_tanh,
    linear_swiglu,
    qk_norm,
    qk_norm_rope,
    quantize_fp8,
    rms_norm_scale,
    swiglu,
)
from samebits.ops._op import Args, Case, Launcher, Op, Outputs

OPS: tuple[Op, ...] = (
    layer_norm_modulate.OP,
    gated_residual_norm_modulate.OP,
    gated_residual.OP,
    rms_norm_scale.OP,
    gated_residual_rms_norm.OP,
    qk_norm.OP,
    qk_norm_rope.OP,
    gelu_tanh.OP,
    swiglu.OP,
    quantize_fp8.OP,
    bias_gated_residual.OP,
    bias_gated_residual_norm_modulate.OP,
    linear_gelu_tanh.OP,
    linear_swiglu.OP,
    joint_projection.OP,
    attention.OP,
)


def by_name(name: str) -> Op:
    """Return the op called ``name``.

    Raises
    ------
    KeyError
        Where there is none; the message names those there are.
    """
    for op in OPS:
        if op.name == name:
            return op
    raise KeyError(f"no op is called {name!r}; there are {', '.join(op.name for op in OPS)}")


__all__ = ["OPS", "Args", "Case", "Launcher", "Op", "Outputs", "by_name"]
