"""The embedded pipelines: whole diffusers pipelines of the real classes, small, built in code, never downloaded.

They make the command line, the demo and the tests run on any machine, and they walk the same lines of diffusers as the
real models do: tokenizer, text encoder, denoiser, scheduler and VAE. What they paint is bright, varied and meaningless.

Importing this package is cheap; torch, diffusers and transformers are imported by :func:`build`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

_HOME = {"tiny-qwen-image": "samebits.tiny.qwen_image", "tiny-z-image": "samebits.tiny.z_image"}

NAMES = tuple(_HOME)
"""The names that :func:`build` knows; the first one is the default model of the command line."""


def build(name: str, dtype: torch.dtype | None = None) -> DiffusionPipeline:
    """Build an embedded pipeline on the CPU. Every build on every machine has the same bits.

    Parameters
    ----------
    name
        One of :data:`NAMES`.
    dtype
        What the fp32 weights are rounded to; ``None`` leaves them. Buffers such as RoPE's frequencies stay fp32, as
        they do when ``from_pretrained`` loads a real model.

    Notes
    -----
    The random state and the default dtype of the caller are left alone, and the latter decides nothing.

    Raises
    ------
    ValueError
        The name is not one of :data:`NAMES`.
    """
    if name not in _HOME:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    import torch

    module = import_module(_HOME[name])
    default = torch.get_default_dtype()
    # The modules' own initialisers draw from the global generator before their values are overwritten.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_default_dtype(torch.float32)
        try:
            pipeline: DiffusionPipeline = module.build()
        finally:
            torch.set_default_dtype(default)
        if dtype is not None:
            for component in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
                for parameter in component.parameters():
                    parameter.data = parameter.data.to(dtype)
    return pipeline
