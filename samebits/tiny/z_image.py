"""tiny-z-image: a whole ``ZImagePipeline`` of the real classes, two blocks and two refiners deep."""

from __future__ import annotations

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from samebits.tiny.tokenizer import build_tokenizer
from samebits.tiny.weights import fill

NAME = "tiny-z-image"
TEXT_WIDTH = 128

SCHEDULER = {
    # The settings that Z-Image-Turbo ships.
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}

TRANSFORMER = {
    "in_channels": 16,
    # Divisible by three: the feed-forward is 8/3 as wide.
    "dim": 192,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": TEXT_WIDTH,
    # The real model splits 128 into 32, 48, 48.
    "axes_dims": [16, 24, 24],
    "axes_lens": [1024, 512, 512],
}

VAE = {
    # Three halvings of the side, as in the real one: the latent is an eighth of the picture.
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 16, 32, 32],
    "layers_per_block": 1,
    "latent_channels": 16,
    "norm_num_groups": 8,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _text_encoder(vocabulary: dict[str, int]) -> Qwen3Model:
    return Qwen3Model(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=vocabulary["<|endoftext|>"],
            eos_token_id=vocabulary["<|im_end|>"],
        )
    )


def build() -> ZImagePipeline:
    """Build the pipeline in fp32 on the CPU: about two million parameters, the same bits every time."""
    tokenizer = build_tokenizer()
    text_encoder = _text_encoder(tokenizer.get_vocab())
    transformer = ZImageTransformer2DModel(**TRANSFORMER)
    vae = AutoencoderKL(**VAE)
    fill(text_encoder, f"{NAME}.text_encoder")
    fill(transformer, f"{NAME}.transformer")
    fill(vae, f"{NAME}.vae", {"decoder.conv_out": 0.5})
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
