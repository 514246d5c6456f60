"""Whole pipelines at their real size with random weights: nothing to download, and the time of every part is real.

The classes and the sizes are those of the published checkpoints; only the vocabulary is the small one of the embedded
pipelines, which costs an embedding no time. What they paint means nothing. Qwen-Image takes about 57 GB of GPU memory
in bf16, Z-Image about 21 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samebits.bench import models

NAMES = tuple(models.BUILDERS)

QWEN_IMAGE_TEXT: Mapping[str, Any] = {  # Qwen2.5-VL 7B
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
}
Z_IMAGE_TEXT: Mapping[str, Any] = {  # Qwen3 4B
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
Z_IMAGE_VAE: Mapping[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def build(
    name: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    text: Mapping[str, Any] | None = None,
    transformer: Mapping[str, Any] | None = None,
    vae: Mapping[str, Any] | None = None,
) -> Any:
    """Build a pipeline on a device.

    Parameters
    ----------
    name : str
        One of ``NAMES``.
    device, dtype
        Of the weights.
    text, transformer, vae : mapping, optional
        Changes to the configurations of the parts. The tests make them small.

    Raises
    ------
    ValueError
        The name is not one of ``NAMES``.
    """
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    make = _qwen_image if name == "qwen-image" else _z_image
    with torch.no_grad():
        return make(device, dtype, text or {}, transformer or {}, vae or {})


def _qwen_image(
    device: torch.device,
    dtype: torch.dtype,
    text: Mapping[str, Any],
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
) -> Any:
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from samebits.tiny.qwen_image import SCHEDULER
    from samebits.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    words = tokenizer.get_vocab()
    encoder = {**QWEN_IMAGE_TEXT, **text, "vocab_size": len(words)}
    # A picture is not looked at, so its tower may be small.
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config={**encoder, "bos_token_id": words["<|endoftext|>"], "eos_token_id": words["<|im_end|>"]},
        vision_config={**tower, "out_hidden_size": encoder["hidden_size"]},
        image_token_id=words["<|image_pad|>"],
        video_token_id=words["<|video_pad|>"],
        vision_start_token_id=words["<|vision_start|>"],
        vision_end_token_id=words["<|vision_end|>"],
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=models.construct(lambda: AutoencoderKLQwenImage(**vae), device, dtype),
        text_encoder=models.construct(lambda: Qwen2_5_VLForConditionalGeneration(config), device, dtype),
        tokenizer=tokenizer,
        transformer=models.qwen_image(device, dtype, side=2, **transformer).model,
    )


def _z_image(
    device: torch.device,
    dtype: torch.dtype,
    text: Mapping[str, Any],
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline
    from transformers import Qwen3Config, Qwen3Model

    from samebits.tiny.tokenizer import build_tokenizer
    from samebits.tiny.z_image import SCHEDULER

    tokenizer = build_tokenizer()
    words = tokenizer.get_vocab()
    ends = {"bos_token_id": words["<|endoftext|>"], "eos_token_id": words["<|im_end|>"]}
    config = Qwen3Config(**{**Z_IMAGE_TEXT, **text, **ends, "vocab_size": len(words)})
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=models.construct(lambda: AutoencoderKL(**{**Z_IMAGE_VAE, **vae}), device, dtype),
        text_encoder=models.construct(lambda: Qwen3Model(config), device, dtype),
        tokenizer=tokenizer,
        transformer=models.z_image(device, dtype, side=2, **transformer).model,
    )
