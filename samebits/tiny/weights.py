"""Weights of the embedded pipelines: the same bits on every machine, and activations that stay alive.

Every value is a random integer times a constant, one rounding, so neither the processor's vector width nor its math
library has a say. Every parameter has its own generator, seeded by its name: a parameter that is added, or built in
another order, changes no other one. Modules are left in eval mode, without gradients.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import nn

_HALF_RANGE = 1 << 20
"""Integers are drawn from [-2^20, 2^20): exact in fp32, and fine enough that bf16 weights differ."""


def spread(name: str, shape: torch.Size) -> torch.Tensor:
    """Return an fp32 tensor of uniform values with mean 0 and standard deviation 1, decided by ``name`` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randint(-_HALF_RANGE, _HALF_RANGE, tuple(shape), generator=generator)
    return whole.to(torch.float32) * (math.sqrt(3.0) / _HALF_RANGE)


def fill(module: nn.Module, seed_name: str, gains: Mapping[str, float] | None = None) -> None:
    """Overwrite every parameter of ``module`` in place.

    Parameters
    ----------
    module
        Any module whose parameters are fp32 and on the CPU.
    seed_name
        Goes in front of every parameter's name before it is hashed.
    gains
        Factor on the spread of the parameters whose full name holds the key; the longest matching key counts.

    Notes
    -----
    Matrices and filters get a standard deviation of ``1 / sqrt(fan_in)``; norm weights ``1 + 0.1 * noise``, because a
    weight of exactly one would hide a kernel that forgets it; embeddings and pad tokens 1; biases 0.1.
    """
    module.eval().requires_grad_(False)
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in module.named_parameters():
        keys = [key for key in gains or {} if key in name]
        gain = gains[max(keys, key=len)] if gains and keys else 1.0
        noise = spread(f"{seed_name}.{name}", parameter.shape)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "gamma" or (leaf == "weight" and parameter.ndim == 1):
            value = 1.0 + 0.1 * gain * noise
        elif leaf == "bias" and parameter.ndim == 1:
            value = 0.1 * gain * noise
        elif id(parameter) in embeddings or leaf.endswith("_token"):
            value = gain * noise
        else:
            value = noise * (gain / math.sqrt(parameter[0].numel()))
        parameter.copy_(value)
