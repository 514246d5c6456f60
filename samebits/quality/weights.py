"""Which weights a record is for: a hash of a module's whole contents, computed where they lie."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_CHUNK = 1 << 24  # elements of 8 bytes that are mixed at a time
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def model_hash(module: nn.Module) -> str:
    """A hash over the names, dtypes, shapes and bytes of every parameter and buffer, 32 hexadecimal digits.

    It runs on the tensors' own device and takes about as long as reading them once or twice. It tells models apart; it
    is no defence against somebody who constructs another model with the same hash.
    """
    digest = hashlib.sha256()
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            digest.update(f"{kind} {name} {tensor.dtype} {tuple(tensor.shape)} {_mixed(tensor)}\n".encode())
    return digest.hexdigest()[:32]


def _mixed(tensor: Tensor) -> int:
    """A number that depends on every byte and its place: words times odd numbers that depend on the place, summed."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8)
    short = -data.numel() % 8
    if short:
        data = torch.cat([data, data.new_zeros(short)])
    # A view into a larger storage may begin anywhere, and torch reads wider words from multiples of their size alone.
    whole = data.clone() if data.storage_offset() % 8 else data
    words = whole.view(torch.int64)
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        places = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        mixed = (part ^ (part >> 29)) * ((places * _GOLDEN) | 1)  # int64 wraps around, as is wanted
        total = (total + int((mixed ^ (mixed >> 32)).sum())) & (2**64 - 1)
    return total
