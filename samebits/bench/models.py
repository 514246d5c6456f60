"""Denoisers at their real size with random weights, and a short sampler to run them with.

No download: the real classes of diffusers with their default configurations, filled from a seed. Qwen-Image in
bf16 takes 41 GB of GPU memory, Z-Image 12 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 4
TEXT_TOKENS = 128


@dataclass(frozen=True)
class Denoiser:
    """A transformer with one input and a way to call it."""

    name: str
    model: nn.Module
    blocks: Sequence[nn.Module]
    """The blocks whose outputs are compared, in the order in which they run."""
    latents: torch.Tensor
    """Where the sampler starts. Never written to."""
    velocity: Callable[[torch.Tensor, float], torch.Tensor]
    """``velocity(latents, sigma)`` runs one forward; same shape and dtype as the latents."""


def _fill(model: nn.Module, widths: Iterable[int], seed: int) -> None:
    """Give the norms weights that are not all one: 1 + 0.1 * normal, for one-dimensional weights of these widths."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    wanted = set(widths)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.numel() in wanted and name.endswith("weight"):
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
            parameter.copy_(1 + 0.1 * noise)


def _construct(build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a model directly on the device and in its dtype, with random weights from a fixed seed."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = build()
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def qwen_image(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 64, **config: Any) -> Denoiser:
    """Qwen-Image: 60 blocks of 24 x 128. ``side`` is the picture's side in tokens (64 for 1024 pixels)."""
    from diffusers import QwenImageTransformer2DModel

    model: Any = _construct(
        lambda: QwenImageTransformer2DModel(**{"in_channels": 64, "out_channels": 16, **config}), device, dtype
    )
    # The rotary tables are plain attributes computed while the model is built: here they would be on the device and
    # in the default dtype of that moment. A loaded pipeline computes them on the CPU in fp32.
    model.pos_embed = type(model.pos_embed)(theta=10_000, axes_dim=list(model.config.axes_dims_rope), scale_rope=True)
    _fill(model, [model.config.attention_head_dim], seed=1)
    generator = torch.Generator(device=device).manual_seed(2)
    latents = torch.randn(1, side * side, model.config.in_channels, generator=generator, device=device, dtype=dtype)
    text = torch.randn(
        1, TEXT_TOKENS, model.config.joint_attention_dim, generator=generator, device=device, dtype=dtype
    )

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        output: torch.Tensor = model(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=torch.full((1,), sigma, device=device, dtype=dtype),
            img_shapes=[[(1, side, side)]],
            return_dict=False,
        )[0]
        return output

    return Denoiser("qwen-image", model, list(model.transformer_blocks), latents, velocity)


def z_image(device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 128, **config: Any) -> Denoiser:
    """Z-Image: 2 + 2 refiner blocks and 30 layers of 30 x 128. ``side`` is the latents' side (128 for 1024 pixels)."""
    from diffusers import ZImageTransformer2DModel

    model: Any = _construct(lambda: ZImageTransformer2DModel(**config), device, dtype)
    generator = torch.Generator(device=device).manual_seed(2)
    for token in (model.x_pad_token, model.cap_pad_token):
        token.normal_(0.0, 0.02, generator=generator)
    _fill(model, [model.config.dim // model.config.n_heads, model.config.dim], seed=1)
    latents = torch.randn(model.config.in_channels, 1, side, side, generator=generator, device=device, dtype=dtype)
    caption = torch.randn(TEXT_TOKENS, model.config.cap_feat_dim, generator=generator, device=device, dtype=dtype)

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        # Z-Image's time runs the other way, and so does its output.
        time = torch.full((1,), 1.0 - sigma, device=device, dtype=dtype)
        output: torch.Tensor = model([latents], time, [caption], return_dict=False)[0][0]
        return -output

    blocks = [*model.noise_refiner, *model.context_refiner, *model.layers]
    return Denoiser("z-image", model, blocks, latents, velocity)


BUILDERS: Mapping[str, Callable[[torch.device], Denoiser]] = {"z-image": z_image, "qwen-image": qwen_image}


def sample(denoiser: Denoiser, steps: int = STEPS) -> list[torch.Tensor]:
    """Flow-match Euler from pure noise; returns the latents after every step."""
    latents, taken = denoiser.latents, []
    for step in range(steps):
        sigma, following = 1.0 - step / steps, 1.0 - (step + 1) / steps
        moved = latents.float() + (following - sigma) * denoiser.velocity(latents, sigma).float()
        latents = moved.to(latents.dtype)
        taken.append(latents)
    return taken
