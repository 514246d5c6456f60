"""Z-Image: ZImageTransformer2DModel of diffusers (Base, Turbo, Edit and Omni).

The forwards below do what diffusers' own do, in the same order, with one call per site. docs/families/z_image.md
maps every replaced line. An RMSNorm whose result nothing scales is a site on the norm itself; the two that the
block scales are sites of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_z_image as theirs
from torch import nn

from samebits.models._family import Family, Function, Line, Replacement, source, unwrapped
from samebits.models._norms import (
    ATTENTION_SOURCE,
    OTHER_ARGUMENTS,
    RMS_NORM,
    RMS_NORM_SOURCE,
    is_plain_rms_norm,
    norm_q_and_k,
    why_not_processor,
    why_not_qk,
    why_not_rms_norm,
)

Block = theirs.ZImageTransformerBlock
Processor = theirs.ZSingleStreamAttnProcessor


def _norm_scale(line: Line, block: Any, name: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``norm(x) * scale`` as one site; ``scale`` is ``(B, 1, D)``, or ``(B, S, D)`` where tokens differ."""
    norm = getattr(block, name)
    if not is_plain_rms_norm(norm):
        line.declined[why_not_rms_norm(name, norm) or "the norm changed during the call"] += 1
        scaled: torch.Tensor = norm(x) * scale
        return scaled
    result: torch.Tensor = line.site(x, norm._parameters["weight"], scale, norm.eps)
    return result


def _modulation(
    block: Any,
    seq_len: int,
    adaln_input: torch.Tensor | None,
    noise_mask: torch.Tensor | None,
    adaln_noisy: torch.Tensor | None,
    adaln_clean: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """scale_msa, gate_msa, scale_mlp, gate_mlp of one block, with ``1 +`` and ``tanh`` already done.

    Each is ``(B, 1, D)``, or ``(B, S, D)`` where a noise mask chooses per token between two modulations.
    """
    if noise_mask is None:
        scale_msa, gate_msa, scale_mlp, gate_mlp = block.adaLN_modulation(adaln_input).unsqueeze(1).chunk(4, dim=2)
        return 1.0 + scale_msa, gate_msa.tanh(), 1.0 + scale_mlp, gate_mlp.tanh()
    noisy = block.adaLN_modulation(adaln_noisy).chunk(4, dim=1)
    clean = block.adaLN_modulation(adaln_clean).chunk(4, dim=1)
    noisy = 1.0 + noisy[0], noisy[1].tanh(), 1.0 + noisy[2], noisy[3].tanh()
    clean = 1.0 + clean[0], clean[1].tanh(), 1.0 + clean[2], clean[3].tanh()
    return tuple(
        theirs.select_per_token(of_noisy, of_clean, noise_mask, seq_len)
        for of_noisy, of_clean in zip(noisy, clean, strict=True)
    )


def _write_block(block: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    attention_norm1, ffn_norm1 = lines["attention_norm1"], lines["ffn_norm1"]

    def forward(
        x: torch.Tensor,
        attn_mask: torch.Tensor | None,
        freqs_cis: torch.Tensor,
        adaln_input: torch.Tensor | None = None,
        noise_mask: torch.Tensor | None = None,
        adaln_noisy: torch.Tensor | None = None,
        adaln_clean: torch.Tensor | None = None,
    ) -> Any:
        scale_msa, gate_msa, scale_mlp, gate_mlp = _modulation(
            block, x.shape[1], adaln_input, noise_mask, adaln_noisy, adaln_clean
        )
        attn_in = _norm_scale(attention_norm1, block, "attention_norm1", x, scale_msa)
        attn_out = block.attention(attn_in, attention_mask=attn_mask, freqs_cis=freqs_cis)
        x = x + gate_msa * block.attention_norm2(attn_out)

        ffn_in = _norm_scale(ffn_norm1, block, "ffn_norm1", x, scale_mlp)
        return x + gate_mlp * block.ffn_norm2(block.feed_forward(ffn_in))

    for name, line in lines.items():
        line.watch = lambda name=name: why_not_rms_norm(name, getattr(block, name))
    return forward


_NORMS = ("norm_q", "norm_k")
_PROCESSOR_TAKES = {"freqs_cis"}


def _write_attention(attn: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    (line,) = lines.values()

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        processor = attn.processor
        if type(processor) is not Processor or not kwargs.keys() <= _PROCESSOR_TAKES:
            # A processor that the user set, or arguments about which diffusers has something to say.
            line.declined[why_not_processor(attn, Processor) or OTHER_ARGUMENTS] += 1
            return original(
                hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **kwargs
            )
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        key = attn.to_k(hidden_states).unflatten(-1, (attn.heads, -1))
        value = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))

        query, key = norm_q_and_k(line, attn, _NORMS, query, key)

        freqs_cis = kwargs.get("freqs_cis")
        if freqs_cis is not None:
            query, key = _rotate(query, freqs_cis), _rotate(key, freqs_cis)
        # diffusers casts the key to the query's own dtype here, which its RoPE has left as it was
        key = key.to(query.dtype)

        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        joint = theirs.dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        output = attn.to_out[0](joint.flatten(2, 3).to(query.dtype))
        return attn.to_out[1](output) if len(attn.to_out) > 1 else output  # dropout

    line.watch = lambda: why_not_processor(attn, Processor) or why_not_qk(_NORMS, attn.norm_q, attn.norm_k)
    return forward


def _rotate(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """RoPE: ``x`` of ``(B, S, H, head_dim)`` as complex pairs times the table ``(B, S, head_dim / 2)``."""
    with torch.amp.autocast("cuda", enabled=False):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)


BLOCK = Replacement(
    of=Block,
    sources=(
        source(Block, "forward", "0010ab78ad4019c99d7773876ada3a22af1b0d6e2b5eb0824613d873bde13b35"),
        RMS_NORM_SOURCE,
    ),
    sites=(("attention_norm1", "rms_norm_scale"), ("ffn_norm1", "rms_norm_scale")),
    write=_write_block,
)

ATTENTION = Replacement(
    of=Attention,
    sources=(
        ATTENTION_SOURCE,
        source(Processor, "__call__", "f8f65d350a61795747f1012c37a8188ca4651b312320caf7c784b135ae4e0354"),
        RMS_NORM_SOURCE,
    ),
    sites=(("qk", "qk_norm"),),
    write=_write_attention,
)


def _places(model: Any) -> Iterator[tuple[str, nn.Module, Replacement]]:
    for stack in ("noise_refiner", "context_refiner", "siglip_refiner", "layers"):
        if stack == "context_refiner":
            yield "cap_embedder.0", model.cap_embedder[0], RMS_NORM
        if stack == "siglip_refiner" and model.siglip_embedder is not None:
            yield "siglip_embedder.0", model.siglip_embedder[0], RMS_NORM
        for number, wrapped in enumerate(getattr(model, stack) or ()):
            block, path = unwrapped(wrapped), f"{stack}.{number}"
            norms = ["attention_norm2", "ffn_norm2"]
            if block.modulation:
                yield path, block, BLOCK
            else:  # nothing scales these two: the block's own forward is as good
                norms = ["attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"]
            yield f"{path}.attention", block.attention, ATTENTION
            for name in norms:
                yield f"{path}.{name}", getattr(block, name), RMS_NORM


FAMILY = Family("z-image", theirs.ZImageTransformer2DModel, _places)
