"""tiny-qwen-image: a whole ``QwenImagePipeline`` of the real classes, two blocks deep."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from samebits.tiny.tokenizer import build_tokenizer
from samebits.tiny.weights import fill

NAME = "tiny-qwen-image"
TEXT_WIDTH = 128

SCHEDULER = {
    # The settings that Qwen-Image ships.
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

TRANSFORMER = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "joint_attention_dim": TEXT_WIDTH,
    # The real model splits 128 into 16, 56, 56.
    "axes_dims_rope": (8, 28, 28),
}

VAE = {
    # Three halvings of the side, as in the real one: the latent is an eighth of the picture.
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}


def _text_encoder(vocabulary: dict[str, int]) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        # Three parts of half a head (32 / 2): time, height, width.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def build() -> QwenImagePipeline:
    """Build the pipeline in fp32 on the CPU: about a million parameters, the same bits every time."""
    tokenizer = build_tokenizer()
    text_encoder = _text_encoder(tokenizer.get_vocab())
    transformer = QwenImageTransformer2DModel(**TRANSFORMER)
    vae = AutoencoderKLQwenImage(**VAE)
    fill(text_encoder, f"{NAME}.text_encoder")
    fill(transformer, f"{NAME}.transformer")
    fill(vae, f"{NAME}.vae", {"decoder.conv_out": 1.25})
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
