"""Qwen-Image: QwenImageTransformer2DModel of diffusers, which Qwen-Image, -Edit and -Layered share.

The forwards below do what diffusers' own do, with one call per site. docs/families/qwen_image.md maps every replaced
line. Modulation vectors come as (shift, scale, gate) in the blocks and as (scale, shift) in ``norm_out``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers import transformer_qwenimage as theirs
from torch import nn

from samebits.models._activations import activation_of
from samebits.models._ahead import LookAhead, may_run_early, weights_of
from samebits.models._both_streams import ONE_BY_ONE, TOGETHER, Both, residual_norms
from samebits.models._family import Family, Function, Line, Replacement, calls_only_forward, source, unwrapped
from samebits.models._norms import (
    ATTENTION_SOURCE,
    CHANGED,
    LAYER_NORM_SOURCE,
    NO_TABLE,
    OTHER_ARGUMENTS,
    RMS_NORM,
    RMS_NORM_SOURCE,
    is_plain_layer_norm,
    plain_weights,
    why_not_layer_norm,
    why_not_processor,
    why_not_weights,
)
from samebits.models._packed import Projections, SideBySide
from samebits.models._quantized import (
    Inner,
    Parts,
    QuantizedFeedForward,
    SharedScale,
    as_input,
    is_placed,
    may_quantise,
    read_by_fp8,
    why_not_past,
    why_not_shared,
)
from samebits.models._shared_silu import SharedSilu, is_silu_and_one_more
from samebits.quant.deferred import Deferrals, DeferredBias, why_not_defer
from samebits.quant.linear import Fp8Linear

Block = theirs.QwenImageTransformerBlock
Processor = theirs.QwenDoubleStreamAttnProcessor2_0
Vectors = tuple[torch.Tensor, ...]


def _modulation(block: Any, number: int, shared: SharedSilu, temb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of both streams: ``(B, 6 * D)``, of the image ``(2 * B, 6 * D)`` with ``zero_cond_t``."""
    img_mod, txt_mod, halved = block.img_mod, block.txt_mod, block.zero_cond_t
    silu = None
    if is_silu_and_one_more(img_mod) and is_silu_and_one_more(txt_mod):
        silu = shared.of(temb, number, halved)
    img_params = img_mod(temb) if silu is None else img_mod._modules["1"](silu.all)
    if silu is not None and silu.holds(temb):  # what is hooked onto that linear may have written to its input
        return img_params, txt_mod._modules["1"](silu.text)
    return img_params, txt_mod(torch.chunk(temb, 2, dim=0)[0] if halved else temb)


def _vectors(params: torch.Tensor) -> Vectors:
    """Shift, scale and gate around the attention, then around the MLP: views of the rows, which the block makes once.

    Six views cost four microseconds, so a block whose modulation was computed ahead gets these with it.
    """
    return params.chunk(6, dim=-1)


def _per_token(vector: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """A modulation vector as it multiplies the tokens: ``(B, 1, D)``, or chosen by index ``(B, S, D)``."""
    if index is None:
        return vector.unsqueeze(1)
    batch = vector.size(0) // 2
    return torch.where(index.unsqueeze(-1) == 0, vector[:batch].unsqueeze(1), vector[batch:].unsqueeze(1))


def _norm(
    line: Line,
    block: Any,
    name: str,
    x: torch.Tensor,
    params: torch.Tensor,
    vectors: Vectors,
    index: Any = None,
    input_scale: torch.Tensor | None = None,
) -> Any:
    """``block._modulate(norm(x), first half of params, index)`` as one site, quantised where a scale is given."""
    norm = getattr(block, name)
    if not is_plain_layer_norm(norm, x.shape[-1]):
        line.declined[why_not_layer_norm(name, norm, x.shape[-1]) or CHANGED] += 1
        modulated: torch.Tensor = block._modulate(norm(x), params.chunk(2, dim=-1)[0], index)[0]
        return modulated
    shift, scale = vectors[:2]
    if input_scale is not None:
        return as_input(line.site(x, scale, shift, norm.eps, index, input_scale), input_scale, x)
    arguments = (x, scale, shift, norm.eps) if index is None else (x, scale, shift, norm.eps, index)
    return line.site(*arguments)


@dataclass(frozen=True)
class Late:
    """How a block adds a bias that a linear left behind: the sites that take it in, by name, and the rounding."""

    lines: Mapping[str, Line]
    native_fma: bool
    where: tuple[torch.device, torch.dtype] | None
    """What activations are moved for: those that the quality record is about; ``None`` for any."""

    def why_not(self, x: torch.Tensor) -> str | None:
        """Why the bits of a call with ``x`` must stay: a sentence, or ``None``."""
        if self.where is None or self.where == (x.device, x.dtype):
            return None
        device, dtype = self.where
        return f"the contract was allowed for {dtype} on {device}, and the last call had {x.dtype} on {x.device}"


def _residual_norm(
    line: Line,
    late: Late | None,
    block: Any,
    name: str,
    x: torch.Tensor,
    branch: Any,
    params: torch.Tensor,
    vectors: Vectors,
    index: Any = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """``x + gate * branch`` and ``block._modulate(norm(that), second half of params, index)`` as one site."""
    norm = getattr(block, name)
    _, _, gate, shift, scale, _ = vectors
    if not is_plain_layer_norm(norm, x.shape[-1]):
        line.declined[why_not_layer_norm(name, norm, x.shape[-1]) or CHANGED] += 1
        x = x + _per_token(gate, index) * _with_bias(branch)
        return x, block._modulate(norm(x), params.chunk(2, dim=-1)[1], index)[0]
    if isinstance(branch, DeferredBias) and late is not None:
        y, bias = branch.take()
        arguments: tuple[Any, ...] = (x, gate, y, bias, scale, shift, norm.eps, late.native_fma, False, index)
        x, modulated = late.lines[f"{name}_bias"].site(*arguments, input_scale)
    elif input_scale is not None:
        x, modulated = line.site(x, gate, _with_bias(branch), scale, shift, norm.eps, False, index, input_scale)
    elif index is None:
        x, modulated = line.site(x, gate, _with_bias(branch), scale, shift, norm.eps)
    else:
        x, modulated = line.site(x, gate, _with_bias(branch), scale, shift, norm.eps, False, index)
    return x, as_input(modulated, input_scale, x)


def _with_bias(branch: Any) -> torch.Tensor:
    """The branch as a tensor: a bias that nobody takes in is added here."""
    result: torch.Tensor = branch.add() if isinstance(branch, DeferredBias) else branch
    return result


def _is_clipped(x: torch.Tensor, gate: torch.Tensor, branch: torch.Tensor) -> bool:
    """Whether a block ends in diffusers' clip for fp16; it asks for the dtype of the sum."""
    return torch.float16 == x.dtype == gate.dtype == branch.dtype


def _residual(
    line: Line,
    late: Late | None,
    name: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    branch: Any,
    index: Any = None,
) -> torch.Tensor:
    """``x + gate * branch``, in fp16 with the clip that ends a block, as one site."""
    if isinstance(branch, DeferredBias) and late is not None:
        y, bias = branch.take()
        clip = _is_clipped(x, gate, y)
        late_result: torch.Tensor = late.lines[f"{name}_bias"].site(x, gate, y, bias, late.native_fma, clip, index)
        return late_result
    branch = _with_bias(branch)
    clip = _is_clipped(x, gate, branch)
    if index is not None:
        arguments: tuple[Any, ...] = (x, gate, branch, clip, index)
    else:
        arguments = (x, gate, branch, True) if clip else (x, gate, branch)
    result: torch.Tensor = line.site(*arguments)
    return result


def _residual_next_norm(
    line: Line,
    late: Late | None,
    name: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    branch: Any,
    vectors: Vectors,
    eps: float,
    index: Any = None,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_residual`` and then ``_norm`` of the next block, whose modulation ``vectors`` are, as one site."""
    shift, scale = vectors[:2]
    if isinstance(branch, DeferredBias) and late is not None:
        y, bias = branch.take()
        arguments: tuple[Any, ...] = (x, gate, y, bias, scale, shift, eps, late.native_fma, _is_clipped(x, gate, y))
        x, modulated = late.lines[f"{name}_bias"].site(*arguments, index, input_scale)
        return x, modulated
    branch = _with_bias(branch)
    clip = _is_clipped(x, gate, branch)
    if input_scale is None:
        x, modulated = line.site(x, gate, branch, scale, shift, eps, clip, index)
    else:
        x, modulated = line.site(x, gate, branch, scale, shift, eps, clip, index, input_scale)
    return x, modulated


AHEAD = "its lines run at the end of the block before, as next_norm1 or {} there"
WITH_NEXT = "its lines run together with the first norm of the next block, as {}"


def _plain_eps(norm: Any, width: int) -> float | None:
    """The eps of a norm that the op may stand for, or ``None``: it may have changed since it was computed ahead."""
    return norm.eps if is_plain_layer_norm(norm, width) else None


def _sources(block: Any, temb: torch.Tensor, index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Everything that the block's modulation is computed from."""
    return temb, index, *weights_of(block.img_mod), *weights_of(block.txt_mod)


def _first_lines_may_run_early(block: Any, temb: torch.Tensor, width: int) -> bool:
    """Whether the modulation and the first norms of ``block`` give now what they give when it is called."""
    return (
        "_modulate" not in block.__dict__
        and is_plain_layer_norm(block.img_norm1, width)
        and is_plain_layer_norm(block.txt_norm1, width)
        and may_run_early(block.img_mod, temb)
        and may_run_early(block.txt_mod, temb)
    )


def _why_not_modulate(block: Any) -> str | None:
    """Why the block's own modulation is not the class's: a sentence, or ``None``."""
    if "_modulate" in block.__dict__:
        return "the block's _modulate was replaced on the instance, which wins over ours"
    return None


_READ = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}
"""The attention's linears that read the first norm of a stream."""


def _may_share(attn: Any) -> bool:
    """Whether the first linear that reads one of the two inputs is in FP8; else neither input has a scale."""
    modules = attn._modules
    return type(modules.get("to_q")) is Fp8Linear or type(modules.get("add_q_proj")) is Fp8Linear


class AttentionScales:
    """The numbers that the inputs of a block's attention may be quantised with, once for all of its projections."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._image, self._text = SharedScale(), SharedScale()

    def of(
        self, block: Any, arguments: dict[str, Any], width: int, defers: bool = False
    ) -> tuple[Inner | None, torch.Tensor | None, torch.Tensor | None]:
        """The attention's own lines if they may be called past the module, and the scales of its two inputs.

        Without a scale the lines are of use to who ``defers`` alone; nobody else is given them.
        """
        attn = block.attn
        if not defers and not _may_share(attn):  # most models have no such linears: ask no more
            return None, None, None
        inner = self._parts.attentions.get(attn)
        if inner is None or not may_quantise() or not is_placed(attn) or not inner.ready(arguments):
            return None, None, None
        image = self._image.of([attn.to_q, attn.to_k, attn.to_v])
        text = self._text.of([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj])
        # A norm that is not plain gives a tensor.
        image = image if is_plain_layer_norm(block.img_norm1, width) else None
        text = text if is_plain_layer_norm(block.txt_norm1, width) else None
        return inner, image, text

    def why_not(self, attn: Any, stream: str) -> str | None:
        """Why the projections of a stream get a tensor: a sentence, or ``None``; for a report."""
        linears = {name: attn._modules.get(name) for name in _READ[stream]}
        shared = self._image if stream == "img" else self._text
        inner = self._parts.attentions.get(attn)
        reason = why_not_past("attn", attn, inner) or why_not_shared(linears, shared)
        return reason if reason is not None or inner is None else inner.why_not()


def _write_block(
    number: int,
    shared: SharedSilu,
    look: LookAhead,
    parts: Parts,
    rounding: str | None,
    where: tuple[torch.device, torch.dtype] | None,
    block: Any,
    original: Function,
    lines: Mapping[str, Line],
) -> Function:
    img_norm1, img_norm2, img_residual = (lines[f"img_{name}"] for name in ("norm1", "norm2", "residual"))
    txt_norm1, txt_norm2, txt_residual = (lines[f"txt_{name}"] for name in ("norm1", "norm2", "residual"))
    img_next, txt_next = lines.get("img_next_norm1"), lines.get("txt_next_norm1")
    norm2 = Both(lines["norm2"])
    next_norm1 = Both(lines["next_norm1"]) if "next_norm1" in lines else None
    late = None if rounding is None else Late(lines, rounding == "fma", where)
    stays: str | None = None
    img_mlp, txt_mlp = (QuantizedFeedForward(parts, block, name) for name in ("img_mlp", "txt_mlp"))
    scales, next_scales = AttentionScales(parts), AttentionScales(parts)
    look.add(number, block)

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: torch.Tensor | None = None,
    ) -> Any:
        nonlocal stays
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
        index, x, text = modulate_index, hidden_states, encoder_hidden_states
        ahead = look.take(number, _sources(block, temb, index), x.device)
        if ahead is None:
            img_params, txt_params = _modulation(block, number, shared, temb)
            img, txt = _vectors(img_params), _vectors(txt_params)
        else:
            img_params, txt_params, img, txt = ahead.modulation
        attention_arguments = {
            "encoder_hidden_states_mask": encoder_hidden_states_mask,
            "image_rotary_emb": image_rotary_emb,
            **(joint_attention_kwargs or {}),
        }
        plain = may_quantise()
        stays = None if late is None else late.why_not(x)
        attention, img_scale, txt_scale = scales.of(block, attention_arguments, x.shape[-1], late is not None)
        img_normed: Any = None
        txt_normed: Any = None
        if ahead is not None:
            img_normed = ahead.stream("img", x, _plain_eps(block.img_norm1, x.shape[-1]), img_scale)
            txt_normed = ahead.stream("txt", text, _plain_eps(block.txt_norm1, text.shape[-1]), txt_scale)
            look.settle(number, img_normed is not None and txt_normed is not None)
            img_normed = None if img_normed is None else as_input(img_normed, img_scale, x)
            txt_normed = None if txt_normed is None else as_input(txt_normed, txt_scale, text)
        if img_normed is None:
            img_normed = _norm(img_norm1, block, "img_norm1", x, img_params, img, index, img_scale)
        if txt_normed is None:
            txt_normed = _norm(txt_norm1, block, "txt_norm1", text, txt_params, txt, None, txt_scale)

        with Deferrals() as made:
            deferrals = None if late is None or stays is not None or attention is None or not plain else made
            streams = {"hidden_states": img_normed, "encoder_hidden_states": txt_normed}
            if (img_scale is None and txt_scale is None and deferrals is None) or attention is None:
                img_attention, txt_attention = block.attn(**streams, **attention_arguments)
            else:
                img_attention, txt_attention = attention.forward(**streams, **attention_arguments, deferrals=deferrals)
            del img_normed, txt_normed, streams
            following, ahead = look.following(number, block, x), None
            next_img_scale = next_txt_scale = None
            if following is not None and _first_lines_may_run_early(following, temb, x.shape[-1]):
                img_next_params, txt_next_params = _modulation(following, number + 1, shared, temb)
                img_vectors, txt_vectors = _vectors(img_next_params), _vectors(txt_next_params)
                modulation = img_next_params, txt_next_params, img_vectors, txt_vectors
                ahead = look.begin(number + 1, _sources(following, temb, index), modulation, x.device)
                _, next_img_scale, next_txt_scale = next_scales.of(following, attention_arguments, x.shape[-1])

            mlp_scales = in_any_order(x.shape[-1]) if plain and deferrals is None else None
            if mlp_scales is None:
                img_mlp_scale = img_mlp.scale() if plain else None
                x, modulated = _residual_norm(
                    img_norm2, late, block, "img_norm2", x, img_attention, img_params, img, index, img_mlp_scale
                )
                branch = img_mlp(modulated, deferrals, "img_mlp")
                if ahead is None or img_next is None:
                    x = _residual(img_residual, late, "img_residual", x, img[5], branch, index)
                else:
                    img_eps = following.img_norm1.eps
                    x, modulated = _residual_next_norm(
                        img_next,
                        late,
                        "img_next_norm1",
                        x,
                        img[5],
                        branch,
                        img_vectors,
                        img_eps,
                        index,
                        next_img_scale,
                    )
                    look.put(ahead, "img", x, modulated, img_eps, next_img_scale)

                txt_mlp_scale = txt_mlp.scale() if plain else None
                text, modulated = _residual_norm(
                    txt_norm2, late, block, "txt_norm2", text, txt_attention, txt_params, txt, None, txt_mlp_scale
                )
                branch = txt_mlp(modulated, deferrals, "txt_mlp")
                if ahead is None or txt_next is None:
                    text = _residual(txt_residual, late, "txt_residual", text, txt[5], branch)
                else:
                    txt_eps = following.txt_norm1.eps
                    text, modulated = _residual_next_norm(
                        txt_next,
                        late,
                        "txt_next_norm1",
                        text,
                        txt[5],
                        branch,
                        txt_vectors,
                        txt_eps,
                        None,
                        next_txt_scale,
                    )
                    look.put(ahead, "txt", text, modulated, txt_eps, next_txt_scale)
            else:
                img_mlp_scale, txt_mlp_scale = mlp_scales
                norms = residual_norms(
                    norm2,
                    (x, text),
                    (img[2], txt[2]),
                    (img_attention, txt_attention),
                    (img[3:5], txt[3:5]),
                    (block.img_norm2.eps, block.txt_norm2.eps),
                    (False, False),
                    index,
                    mlp_scales,
                )
                if norms is None:
                    norms = (
                        *_residual_norm(
                            img_norm2, late, block, "img_norm2", x, img_attention, img_params, img, index, img_mlp_scale
                        ),
                        *_residual_norm(
                            txt_norm2,
                            late,
                            block,
                            "txt_norm2",
                            text,
                            txt_attention,
                            txt_params,
                            txt,
                            None,
                            txt_mlp_scale,
                        ),
                    )
                    x, img_modulated, text, txt_modulated = norms
                else:
                    x, img_modulated, text, txt_modulated = norms
                    img_modulated = as_input(img_modulated, img_mlp_scale, x)
                    txt_modulated = as_input(txt_modulated, txt_mlp_scale, text)
                img_branch = _with_bias(img_mlp(img_modulated, None, "img_mlp"))
                txt_branch = _with_bias(txt_mlp(txt_modulated, None, "txt_mlp"))
                if ahead is None or next_norm1 is None or img_next is None or txt_next is None:
                    x = _residual(img_residual, late, "img_residual", x, img[5], img_branch, index)
                    text = _residual(txt_residual, late, "txt_residual", text, txt[5], txt_branch)
                else:
                    eps = following.img_norm1.eps, following.txt_norm1.eps
                    norms = residual_norms(
                        next_norm1,
                        (x, text),
                        (img[5], txt[5]),
                        (img_branch, txt_branch),
                        (img_vectors[:2], txt_vectors[:2]),
                        eps,
                        (_is_clipped(x, img[5], img_branch), _is_clipped(text, txt[5], txt_branch)),
                        index,
                        (next_img_scale, next_txt_scale),
                    )
                    if norms is None:
                        img_arguments = (x, img[5], img_branch, img_vectors, eps[0], index, next_img_scale)
                        txt_arguments = (text, txt[5], txt_branch, txt_vectors, eps[1], None, next_txt_scale)
                        norms = (
                            *_residual_next_norm(img_next, late, "img_next_norm1", *img_arguments),
                            *_residual_next_norm(txt_next, late, "txt_next_norm1", *txt_arguments),
                        )
                    x, img_modulated, text, txt_modulated = norms
                    look.put(ahead, "img", x, img_modulated, eps[0], next_img_scale)
                    look.put(ahead, "txt", text, txt_modulated, eps[1], next_txt_scale)
        return text, x

    def in_any_order(width: int) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """The scales of both feed-forwards' inputs; ``None`` where somebody may see in which order the streams run."""
        if not is_plain_layer_norm(block.img_norm2, width) or not is_plain_layer_norm(block.txt_norm2, width):
            return None
        (img_is_plain, img_scale), (txt_is_plain, txt_scale) = img_mlp.plain_scale(), txt_mlp.plain_scale()
        return (img_scale, txt_scale) if img_is_plain and txt_is_plain else None

    def why_one_by_one() -> str | None:
        """Why the next call would serve the two streams one after the other, as far as is known before it."""
        if late is not None and stays is None:
            return "linears leave their biases to what follows, each at its own time"
        for name in ("img_norm2", "txt_norm2"):
            if (reason := why_not_layer_norm(name, getattr(block, name))) is not None:
                return reason
        for name, mlp in (("img_mlp", img_mlp), ("txt_mlp", txt_mlp)):
            if not mlp.plain_scale()[0]:
                return f"{name} is not diffusers' own FeedForward with a plain GELU and nothing hooked onto it"
        return norm2.obstacle(next(block.parameters()).device)

    def why_not(name: str) -> str | None:
        apart = why_one_by_one()
        if name in _OF_BOTH:
            return _why_not_modulate(block) or (None if apart is None else ONE_BY_ONE.format(apart))
        stream, _, part = name.partition("_")
        reason = why_not_layer_norm(name, getattr(block, name)) if part in ("norm1", "norm2") else None
        if part == "norm1" and number > 0:
            reason = reason or AHEAD.format(f"{stream}_next_norm1")
        elif name.endswith("_bias") and stays is not None:
            reason = stays
        elif part == "residual" and img_next is not None:
            reason = WITH_NEXT.format("next_norm1" if apart is None else f"{stream}_next_norm1")
        elif part in _OF_BOTH and apart is None:
            reason = TOGETHER.format(part)
        return _why_not_modulate(block) or reason

    def why_tensor(stream: str, part: str) -> str | None:
        """Why the FP8 linears that read a norm get a tensor of it."""
        name, mlp = f"{stream}_{part}", img_mlp if stream == "img" else txt_mlp
        if not (read_by_fp8(block.attn, _READ[stream]) if part == "norm1" else mlp.reads_fp8()):
            return None
        told = scales.why_not(block.attn, stream) if part == "norm1" else mlp.why_not(f"{stream}_mlp")
        return why_not_layer_norm(name, getattr(block, name)) or told

    for name, line in lines.items():
        line.watch = lambda name=name: why_not(name)
    for stream in ("img", "txt"):
        for part in ("norm1", "norm2"):
            lines[f"{stream}_{part}"].why_tensor = lambda stream=stream, part=part: why_tensor(stream, part)
    return forward


_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_PROCESSOR_TAKES = {"encoder_hidden_states_mask", "image_rotary_emb"}


def _write_attention(parts: Parts, attn: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    line = lines["qk"]
    # The weights stay where they are: joined with those of query and key they are slower for the image's many rows.
    join_values = Projections(lines["values"], SideBySide(attn, ("to_v",)), SideBySide(attn, ("add_v_proj",)))
    rope = theirs.apply_rotary_emb_qwen

    def why_not() -> str | None:
        if theirs.apply_rotary_emb_qwen is not rope:
            return "diffusers' apply_rotary_emb_qwen was replaced by another function"
        return why_not_processor(attn, Processor) or why_not_weights(attn, _NORMS)

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        deferrals: Deferrals | None = None,
        **kwargs: Any,
    ) -> Any:
        processor, text = attn.processor, encoder_hidden_states
        known = (
            type(processor) is Processor
            and text is not None
            and attention_mask is None
            and kwargs.keys() <= _PROCESSOR_TAKES
        )
        tables = kwargs.get("image_rotary_emb")
        norms = plain_weights(attn, _NORMS)
        if (
            not known
            or text is None
            or norms is None
            or theirs.apply_rotary_emb_qwen is not rope
            or not _are_two_tables(tables)
        ):
            # A part that the user set, or a call about which diffusers has something to say.
            reason = why_not() or (NO_TABLE if known else OTHER_ARGUMENTS)
            for part in lines.values():
                part.declined[reason] += 1
            return original(
                hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **kwargs
            )
        mask = kwargs.get("encoder_hidden_states_mask")
        if mask is not None:
            image = hidden_states if isinstance(hidden_states, torch.Tensor) else hidden_states.values
            image_mask = torch.ones(image.shape[:2], dtype=torch.bool, device=image.device)
            attention_mask = torch.cat([mask, image_mask], dim=1)[:, None, None, :]

        # The head count is left to unflatten: under tensor parallelism a rank holds a part of the heads.
        heads = (-1, attn.inner_dim // attn.heads)
        weights, eps = norms
        image_table, text_table = tables
        value = join_values(hidden_states, text) if may_join(hidden_states, text) else None
        apart = value is None
        query, key, *joined = line.site(
            attn.to_q(hidden_states).unflatten(-1, heads),
            attn.to_k(hidden_states).unflatten(-1, heads),
            attn.to_v(hidden_states).unflatten(-1, heads) if apart else None,
            weights[0],
            weights[1],
            image_table,
            attn.add_q_proj(text).unflatten(-1, heads),
            attn.add_k_proj(text).unflatten(-1, heads),
            attn.add_v_proj(text).unflatten(-1, heads) if apart else None,
            weights[2],
            weights[3],
            text_table,
            eps,
            "diffusers",
        )
        joint = theirs.dispatch_attention_fn(
            query,
            key,
            joined[0] if value is None else torch.unflatten(value, -1, heads),
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
        joint = joint.flatten(2, 3).to(query.dtype)
        tokens = (text if isinstance(text, torch.Tensor) else text.values).shape[1]
        image_part, text_part = joint[:, tokens:, :].contiguous(), joint[:, :tokens, :].contiguous()
        img_output = _output(attn.to_out[0], image_part, deferrals if _drops_nothing(attn.to_out) else None, "to_out")
        if len(attn.to_out) > 1 and not isinstance(img_output, DeferredBias):
            img_output = attn.to_out[1](img_output)  # dropout
        return img_output, _output(attn.to_add_out, text_part, deferrals, "to_add_out")

    def ready(kwargs: dict[str, Any]) -> bool:
        """Whether ``forward`` answers such a call with its own lines."""
        return (
            type(attn.processor) is Processor
            and kwargs.keys() <= _PROCESSOR_TAKES
            and theirs.apply_rotary_emb_qwen is rope
            and _are_two_tables(kwargs.get("image_rotary_emb"))
            and plain_weights(attn, _NORMS) is not None
        )

    parts.attentions[attn] = Inner(ready, forward, why_not)

    line.watch = why_not
    lines["values"].watch = lambda: why_not() or join_values.why_not()
    return forward


def may_join(*inputs: Any) -> bool:
    """Whether these are tensors: of what is quantised already no plain products are joined."""
    return all(isinstance(value, torch.Tensor) for value in inputs)


def _drops_nothing(to_out: Any) -> bool:
    """Whether what follows the first linear hands its input on, so that a bias may come after it."""
    rest = list(to_out)[1:]
    return all(type(part) is nn.Dropout and not part.training and calls_only_forward(part.__dict__) for part in rest)


def _output(linear: Any, x: torch.Tensor, deferrals: Deferrals | None, name: str) -> Any:
    """``linear(x)``, or its product without the bias where that is to be added later."""
    if deferrals is None or why_not_defer(linear) is not None:
        return linear(x)
    return deferrals.defer(linear, x, name)


def _are_two_tables(tables: Any) -> TypeGuard[Sequence[torch.Tensor]]:
    """Whether these are the model's tables, one for the image and one for the text, each ``(S, head_dim / 2)``."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        return False
    return getattr(tables[0], "ndim", 0) == 2 and getattr(tables[1], "ndim", 0) == 2


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


_BLOCK_SOURCES = (
    source(Block, "forward", "89de238db44a7a47fb3977b20366118d2108a36ecde36be2c5d2d2c33658b609"),
    source(Block, "_modulate", "9ee78b512057d504ae89f8e48b1c8c552aa29a8c0f214b5095766a963c5454d7"),
    LAYER_NORM_SOURCE,
)
_OF_BOTH = ("norm2", "next_norm1")
"""Sites that serve both streams."""
_BLOCK_SITES = (
    ("img_norm1", "layer_norm_modulate"),
    ("txt_norm1", "layer_norm_modulate"),
    ("img_norm2", "gated_residual_norm_modulate"),
    ("img_residual", "gated_residual"),
    ("txt_norm2", "gated_residual_norm_modulate"),
    ("txt_residual", "gated_residual"),
    ("norm2", "gated_residual_norm_modulate"),
)
_ACROSS_BLOCKS = (
    ("img_next_norm1", "gated_residual_norm_modulate"),
    ("txt_next_norm1", "gated_residual_norm_modulate"),
    ("next_norm1", "gated_residual_norm_modulate"),
)

ATTENTION = Replacement(
    of=Attention,
    sources=(
        ATTENTION_SOURCE,
        source(Processor, "__call__", "e6dfad13458f15b376dfaa641bbd5b41669fc35f87dc030bc7be9737c1b1aed6"),
        source(theirs, "apply_rotary_emb_qwen", "62c3cf93c5e4d4eb7814a163cf8cf1ead83dbc09bf099a0776a0f9ceea8682a4"),
        RMS_NORM_SOURCE,
    ),
    sites=(("values", "joint_projection"), ("qk", "qk_norm_rope")),
    write=partial(_write_attention, Parts()),
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


_LATE = tuple(
    (f"{stream}_{name}_bias", op)
    for stream in ("img", "txt")
    for name, op in (("norm2", "bias_gated_residual_norm_modulate"), ("residual", "bias_gated_residual"))
)
_LATE_ACROSS = tuple((f"{stream}_next_norm1_bias", "bias_gated_residual_norm_modulate") for stream in ("img", "txt"))


def _places(
    model: Any, rounding: str | None = None, where: tuple[torch.device, torch.dtype] | None = None
) -> Iterator[tuple[str, nn.Module, Replacement]]:
    shared, look, parts = SharedSilu(), LookAhead(), Parts()
    yield "txt_norm", model.txt_norm, RMS_NORM
    for number, wrapped in enumerate(model.transformer_blocks):
        block, path = unwrapped(wrapped), f"transformer_blocks.{number}"
        is_last = number + 1 == len(model.transformer_blocks)
        sites = _BLOCK_SITES + (() if is_last else _ACROSS_BLOCKS)
        if rounding is not None:
            sites += _LATE + (() if is_last else _LATE_ACROSS)
        write = partial(_write_block, number, shared, look, parts, rounding, where)
        yield path, block, Replacement(Block, _BLOCK_SOURCES, sites, write)
        yield f"{path}.attn", block.attn, replace(ATTENTION, write=partial(_write_attention, parts))
        for name in ("img_mlp", "txt_mlp"):
            yield activation_of(f"{path}.{name}", getattr(block, name), parts.gelus)
    yield "norm_out", model.norm_out, NORM_OUT


FAMILY = Family("qwen-image", theirs.QwenImageTransformer2DModel, _places, defers=True)
