"""Denoisers at their real size with random weights, and a short sampler to run them with.

No download: the real classes of diffusers with their default configurations, filled from a seed. Qwen-Image in
bf16 takes 41 GB of GPU memory, Z-Image 12 GB. ``SMALL`` holds configurations of the same classes that a CPU runs in a
moment; no figure that is taken from them means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    def forward(self) -> torch.Tensor:
        """One forward on the latents that the sampler starts from, at sigma 0.7."""
        return self.velocity(self.latents, 0.7)


def _fill(model: nn.Module, widths: Iterable[int], seed: int) -> None:
    """Give the norms weights that are not all one: 1 + 0.1 * normal, for one-dimensional weights of these widths."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    wanted = set(widths)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.numel() in wanted and name.endswith("weight"):
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
            parameter.copy_(1 + 0.1 * noise)


def construct(build: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
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


def _of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameter = next(model.parameters())
    return parameter.device, parameter.dtype


def qwen_image(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 64, batch: int = 1, **config: Any
) -> Denoiser:
    """Qwen-Image: 60 blocks of 24 x 128. ``side`` is the picture's side in tokens (64 for 1024 pixels)."""
    from diffusers import QwenImageTransformer2DModel

    model: Any = construct(
        lambda: QwenImageTransformer2DModel(**{"in_channels": 64, "out_channels": 16, **config}), device, dtype
    )
    # The rotary tables are plain attributes computed while the model is built: here they would be on the device and
    # in the default dtype of that moment. A loaded pipeline computes them on the CPU in fp32.
    model.pos_embed = type(model.pos_embed)(theta=10_000, axes_dim=list(model.config.axes_dims_rope), scale_rope=True)
    _fill(model, [model.config.attention_head_dim], seed=1)
    return _qwen_image_at(model, side, batch)


def _qwen_image_at(model: Any, side: int, batch: int) -> Denoiser:
    """The denoiser with inputs for ``batch`` pictures of ``side`` x ``side`` tokens."""
    device, dtype = _of(model)
    generator = torch.Generator(device=device).manual_seed(2)
    latents = torch.randn(batch, side * side, model.config.in_channels, generator=generator, device=device, dtype=dtype)
    text = torch.randn(
        batch, TEXT_TOKENS, model.config.joint_attention_dim, generator=generator, device=device, dtype=dtype
    )

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        output: torch.Tensor = model(
            hidden_states=latents,
            encoder_hidden_states=text,
            timestep=torch.full((batch,), sigma, device=device, dtype=dtype),
            img_shapes=[[(1, side, side)]] * batch,
            return_dict=False,
        )[0]
        return output

    return Denoiser("qwen-image", model, list(model.transformer_blocks), latents, velocity)


def z_image(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, side: int = 128, batch: int = 1, **config: Any
) -> Denoiser:
    """Z-Image: 2 + 2 refiner blocks and 30 layers of 30 x 128. ``side`` is the latents' side (128 for 1024 pixels)."""
    from diffusers import ZImageTransformer2DModel

    model: Any = construct(lambda: ZImageTransformer2DModel(**config), device, dtype)
    generator = torch.Generator(device=device).manual_seed(2)
    for token in (model.x_pad_token, model.cap_pad_token):
        token.normal_(0.0, 0.02, generator=generator)
    _fill(model, [model.config.dim // model.config.n_heads, model.config.dim], seed=1)
    return _z_image_at(model, side, batch)


def _z_image_at(model: Any, side: int, batch: int) -> Denoiser:
    """The denoiser with inputs for ``batch`` pictures whose latents are ``side`` x ``side``; one has no batch axis."""
    device, dtype = _of(model)
    generator = torch.Generator(device=device).manual_seed(3)
    shape = (model.config.in_channels, 1, side, side)
    latents = torch.randn(shape if batch == 1 else (batch, *shape), generator=generator, device=device, dtype=dtype)
    captions = list(
        torch.randn(batch, TEXT_TOKENS, model.config.cap_feat_dim, generator=generator, device=device, dtype=dtype)
    )

    def velocity(latents: torch.Tensor, sigma: float) -> torch.Tensor:
        # Z-Image's time runs the other way, and so does its output.
        time = torch.full((batch,), 1.0 - sigma, device=device, dtype=dtype)
        output: list[torch.Tensor]
        output = model([latents] if batch == 1 else list(latents), time, captions, return_dict=False)[0]
        return -(output[0] if batch == 1 else torch.stack(list(output)))

    blocks = [*model.noise_refiner, *model.context_refiner, *model.layers]
    return Denoiser("z-image", model, blocks, latents, velocity)


BUILDERS: Mapping[str, Callable[[torch.device], Denoiser]] = {"z-image": z_image, "qwen-image": qwen_image}

SIZE_MULTIPLE = 16
"""Sides of pictures, in pixels, are multiples of it: the VAE divides by 8, a patch by 2."""

SMALL_SIZE = 128
"""The size that ``SMALL`` is built for."""

SMALL: Mapping[str, Callable[[torch.device], Denoiser]] = {
    "z-image": partial(
        z_image,
        dtype=torch.float32,
        side=16,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=48,
        axes_dims=[8, 12, 12],
        axes_lens=[1024, 512, 512],
    ),
    "qwen-image": partial(
        qwen_image,
        dtype=torch.float32,
        side=8,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=48,
        axes_dims_rope=(8, 12, 12),
    ),
}


def at_size(denoiser: Denoiser, pixels: int, batch: int = 1) -> Denoiser:
    """The same model with inputs for ``batch`` square pictures of ``pixels`` x ``pixels``.

    Raises
    ------
    ValueError
        ``pixels`` is not a positive multiple of ``SIZE_MULTIPLE``, or ``batch`` is below one.
    """
    if pixels < SIZE_MULTIPLE or pixels % SIZE_MULTIPLE:
        raise ValueError(f"expected a size that is a positive multiple of {SIZE_MULTIPLE} pixels, got {pixels}")
    if batch < 1:
        raise ValueError(f"expected a batch of at least 1, got {batch}")
    if denoiser.name == "qwen-image":
        return _qwen_image_at(denoiser.model, pixels // 16, batch)
    return _z_image_at(denoiser.model, pixels // 8, batch)


def sample(denoiser: Denoiser, steps: int = STEPS) -> list[torch.Tensor]:
    """Flow-match Euler from pure noise; returns the latents after every step."""
    latents, taken = denoiser.latents, []
    for step in range(steps):
        sigma, following = 1.0 - step / steps, 1.0 - (step + 1) / steps
        moved = latents.float() + (following - sigma) * denoiser.velocity(latents, sigma).float()
        latents = moved.to(latents.dtype)
        taken.append(latents)
    return taken
