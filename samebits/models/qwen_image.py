"""Qwen-Image: QwenImageTransformer2DModel of diffusers, which Qwen-Image, -Edit and -Layered share.

The forwards below do what diffusers' own do, in the same order, with one call per site. docs/families/qwen_image.md
maps every replaced line. Modulation vectors come as (shift, scale, gate) in the blocks and as (scale, shift) in
``norm_out``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers import transformer_qwenimage as theirs
from torch import nn

from samebits.models._family import Family, Function, Line, Replacement, source, unwrapped
from samebits.models._norms import (
    ATTENTION_SOURCE,
    LAYER_NORM_SOURCE,
    OTHER_ARGUMENTS,
    RMS_NORM,
    RMS_NORM_SOURCE,
    is_plain_layer_norm,
    norm_q_and_k,
    why_not_layer_norm,
    why_not_processor,
    why_not_qk,
)

Block = theirs.QwenImageTransformerBlock
Processor = theirs.QwenDoubleStreamAttnProcessor2_0


def _modulate(
    line: Line, block: Any, name: str, x: torch.Tensor, mod_params: torch.Tensor, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``block._modulate(norm(x), mod_params, index)`` with the norm and the modulation as one site.

    ``mod_params`` is ``(B, 3 * D)``, or ``(2 * B, 3 * D)`` with an ``index`` of ``(B, S)`` that chooses per token
    between row b (index 0) and row b + B.
    """
    norm = getattr(block, name)
    if not is_plain_layer_norm(norm, x.shape[-1]):
        line.declined[why_not_layer_norm(name, norm, x.shape[-1]) or "the norm changed during the call"] += 1
        modulated, gate = block._modulate(norm(x), mod_params, index)
        return modulated, gate
    shift, scale, gate = mod_params.chunk(3, dim=-1)
    if index is None:
        return line.site(x, scale, shift, norm.eps), gate.unsqueeze(1)
    batch = gate.size(0) // 2
    gate = torch.where(index.unsqueeze(-1) == 0, gate[:batch].unsqueeze(1), gate[batch:].unsqueeze(1))
    return line.site(x, scale, shift, norm.eps, index), gate


def _why_not_modulate(block: Any) -> str | None:
    """Why the block's own modulation is not the class's: a sentence, or ``None``."""
    if "_modulate" in block.__dict__:
        return "the block's _modulate was replaced on the instance, which wins over ours"
    return None


def _write_block(block: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    img_norm1, img_norm2 = lines["img_norm1"], lines["img_norm2"]
    txt_norm1, txt_norm2 = lines["txt_norm1"], lines["txt_norm2"]

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: torch.Tensor | None = None,
    ) -> Any:
        replaced = _why_not_modulate(block)
        if replaced is not None:
            for line in lines.values():
                line.declined[replaced] += 1
            return original(
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                temb,
                image_rotary_emb,
                joint_attention_kwargs,
                modulate_index,
            )
        img_mod_params = block.img_mod(temb)
        if block.zero_cond_t:
            temb = torch.chunk(temb, 2, dim=0)[0]  # the text stream sees the first half only
        txt_mod_params = block.txt_mod(temb)
        img_mod1, img_mod2 = img_mod_params.chunk(2, dim=-1)
        txt_mod1, txt_mod2 = txt_mod_params.chunk(2, dim=-1)

        img_modulated, img_gate1 = _modulate(img_norm1, block, "img_norm1", hidden_states, img_mod1, modulate_index)
        txt_modulated, txt_gate1 = _modulate(txt_norm1, block, "txt_norm1", encoder_hidden_states, txt_mod1)
        img_attention, txt_attention = block.attn(
            hidden_states=img_modulated,
            encoder_hidden_states=txt_modulated,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        hidden_states = hidden_states + img_gate1 * img_attention
        encoder_hidden_states = encoder_hidden_states + txt_gate1 * txt_attention

        img_modulated, img_gate2 = _modulate(img_norm2, block, "img_norm2", hidden_states, img_mod2, modulate_index)
        hidden_states = hidden_states + img_gate2 * block.img_mlp(img_modulated)
        txt_modulated, txt_gate2 = _modulate(txt_norm2, block, "txt_norm2", encoder_hidden_states, txt_mod2)
        encoder_hidden_states = encoder_hidden_states + txt_gate2 * block.txt_mlp(txt_modulated)

        if encoder_hidden_states.dtype == torch.float16:
            encoder_hidden_states = encoder_hidden_states.clip(-65504, 65504)
        if hidden_states.dtype == torch.float16:
            hidden_states = hidden_states.clip(-65504, 65504)
        return encoder_hidden_states, hidden_states

    for name, line in lines.items():
        line.watch = lambda name=name: _why_not_modulate(block) or why_not_layer_norm(name, getattr(block, name))
    return forward


_IMAGE_NORMS = ("norm_q", "norm_k")
_TEXT_NORMS = ("norm_added_q", "norm_added_k")
_PROCESSOR_TAKES = {"encoder_hidden_states_mask", "image_rotary_emb"}


def _write_attention(attn: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    img_qk, txt_qk = lines["img_qk"], lines["txt_qk"]

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        processor = attn.processor
        if (
            type(processor) is not Processor
            or encoder_hidden_states is None
            or attention_mask is not None
            or not kwargs.keys() <= _PROCESSOR_TAKES
        ):
            # A processor that the user set, or arguments about which diffusers has something to say.
            reason = why_not_processor(attn, Processor) or OTHER_ARGUMENTS
            img_qk.declined[reason] += 1
            txt_qk.declined[reason] += 1
            return original(
                hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **kwargs
            )
        encoder_hidden_states_mask = kwargs.get("encoder_hidden_states_mask")
        image_rotary_emb = kwargs.get("image_rotary_emb")
        if encoder_hidden_states_mask is not None:
            image_mask = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
            attention_mask = torch.cat([encoder_hidden_states_mask, image_mask], dim=1)[:, None, None, :]

        # The head count is left to unflatten: under tensor parallelism a rank holds a part of the heads.
        heads = (-1, attn.inner_dim // attn.heads)
        img_query = attn.to_q(hidden_states).unflatten(-1, heads)
        img_key = attn.to_k(hidden_states).unflatten(-1, heads)
        img_value = attn.to_v(hidden_states).unflatten(-1, heads)
        txt_query = attn.add_q_proj(encoder_hidden_states).unflatten(-1, heads)
        txt_key = attn.add_k_proj(encoder_hidden_states).unflatten(-1, heads)
        txt_value = attn.add_v_proj(encoder_hidden_states).unflatten(-1, heads)

        img_query, img_key = norm_q_and_k(img_qk, attn, _IMAGE_NORMS, img_query, img_key)
        txt_query, txt_key = norm_q_and_k(txt_qk, attn, _TEXT_NORMS, txt_query, txt_key)

        if image_rotary_emb is not None:
            img_freqs, txt_freqs = image_rotary_emb
            img_query = theirs.apply_rotary_emb_qwen(img_query, img_freqs, use_real=False)
            img_key = theirs.apply_rotary_emb_qwen(img_key, img_freqs, use_real=False)
            txt_query = theirs.apply_rotary_emb_qwen(txt_query, txt_freqs, use_real=False)
            txt_key = theirs.apply_rotary_emb_qwen(txt_key, txt_freqs, use_real=False)

        query = torch.cat([txt_query, img_query], dim=1)
        joint = theirs.dispatch_attention_fn(
            query,
            torch.cat([txt_key, img_key], dim=1),
            torch.cat([txt_value, img_value], dim=1),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        joint = joint.flatten(2, 3).to(query.dtype)
        tokens = encoder_hidden_states.shape[1]
        img_output = attn.to_out[0](joint[:, tokens:, :].contiguous())
        if len(attn.to_out) > 1:
            img_output = attn.to_out[1](img_output)  # dropout
        return img_output, attn.to_add_out(joint[:, :tokens, :].contiguous())

    def why_not(norms: tuple[str, str]) -> str | None:
        return why_not_processor(attn, Processor) or why_not_qk(norms, *(getattr(attn, name) for name in norms))

    img_qk.watch = lambda: why_not(_IMAGE_NORMS)
    txt_qk.watch = lambda: why_not(_TEXT_NORMS)
    return forward


def _write_norm_out(norm_out: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    (line,) = lines.values()

    def forward(x: torch.Tensor, conditioning_embedding: torch.Tensor) -> Any:
        norm = norm_out.norm
        if x.ndim != 3 or not is_plain_layer_norm(norm, x.shape[-1]):
            line.declined[why_not_layer_norm("norm", norm, x.shape[-1]) or "the input is not (B, S, D)"] += 1
            return original(x, conditioning_embedding)
        emb = norm_out.linear(norm_out.silu(conditioning_embedding).to(x.dtype))
        scale, shift = torch.chunk(emb, 2, dim=1)
        return line.site(x, scale, shift, norm.eps)

    line.watch = lambda: why_not_layer_norm("norm", norm_out.norm)
    return forward


BLOCK = Replacement(
    of=Block,
    sources=(
        source(Block, "forward", "89de238db44a7a47fb3977b20366118d2108a36ecde36be2c5d2d2c33658b609"),
        source(Block, "_modulate", "9ee78b512057d504ae89f8e48b1c8c552aa29a8c0f214b5095766a963c5454d7"),
        LAYER_NORM_SOURCE,
    ),
    sites=tuple((name, "layer_norm_modulate") for name in ("img_norm1", "txt_norm1", "img_norm2", "txt_norm2")),
    write=_write_block,
)

ATTENTION = Replacement(
    of=Attention,
    sources=(
        ATTENTION_SOURCE,
        source(Processor, "__call__", "e6dfad13458f15b376dfaa641bbd5b41669fc35f87dc030bc7be9737c1b1aed6"),
        RMS_NORM_SOURCE,
    ),
    sites=(("img_qk", "qk_norm"), ("txt_qk", "qk_norm")),
    write=_write_attention,
)

NORM_OUT = Replacement(
    of=AdaLayerNormContinuous,
    sources=(
        source(AdaLayerNormContinuous, "forward", "da3e50ebcd024fc2040e7e4afc211c8717142198b743486e507c0770fa4b2909"),
        LAYER_NORM_SOURCE,
    ),
    sites=(("", "layer_norm_modulate"),),
    write=_write_norm_out,
)


def _places(model: Any) -> Iterator[tuple[str, nn.Module, Replacement]]:
    yield "txt_norm", model.txt_norm, RMS_NORM
    for number, block in enumerate(model.transformer_blocks):
        yield f"transformer_blocks.{number}", block, BLOCK
        yield f"transformer_blocks.{number}.attn", unwrapped(block).attn, ATTENTION
    yield "norm_out", model.norm_out, NORM_OUT


FAMILY = Family("qwen-image", theirs.QwenImageTransformer2DModel, _places)
