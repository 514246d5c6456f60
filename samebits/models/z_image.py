"""Z-Image: ZImageTransformer2DModel of diffusers (Base, Turbo, Edit and Omni).

The forwards below do what diffusers' own do, in the same order, with one call per site. docs/families/z_image.md
maps every replaced line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers import transformer_z_image as theirs
from torch import nn

from samebits import capture
from samebits.models._ahead import LookAhead, may_run_early, weights_of
from samebits.models._attention import Attention as Attend
from samebits.models._family import Family, Function, Line, Replacement, source, unwrapped
from samebits.models._norms import (
    ATTENTION_SOURCE,
    CHANGED,
    NO_TABLE,
    OTHER_ARGUMENTS,
    RMS_NORM,
    RMS_NORM_SOURCE,
    is_plain_rms_norm,
    plain_weights,
    why_not_processor,
    why_not_rms_norm,
    why_not_weights,
)
from samebits.models._packed import Projections, SideBySide
from samebits.models._products import Product
from samebits.models._quantized import (
    Reader,
    Readers,
    as_input,
    holds_fp8,
    input_scale_of,
    may_quantise,
    read_by_fp8,
    where_plain,
    why_no_input_scale,
)

Block = theirs.ZImageTransformerBlock
Processor = theirs.ZSingleStreamAttnProcessor
FeedForward = theirs.FeedForward
Maybe = torch.Tensor | None


AHEAD = "its lines run at the end of the block before, as ffn_norm2 there"
QUANTISED_AFTER = "the activation is quantised on its way to w2, which its own site does"


class _Modulation(NamedTuple):
    """What modulates one block: each ``(B, 1, D)``, ``(B, S, D)`` where tokens differ, or ``None`` without modulation.

    Every norm adds the one to its own scale. The gates get their tanh beside the block's first norm.
    """

    scale_msa: Maybe = None
    gate_msa: Maybe = None
    scale_mlp: Maybe = None
    gate_mlp: Maybe = None
    shut: bool = False
    """Whether the gates still lack their tanh."""

    def shut_gates(self) -> tuple[Maybe, ...]:
        """The gates that the first norm's site is to take along."""
        return (self.gate_msa, self.gate_mlp) if self.shut else ()

    def opened(self, gates: tuple[Maybe, ...]) -> _Modulation:
        """With what the site gave for its gates, if it took any."""
        return self._replace(gate_msa=gates[0], gate_mlp=gates[1], shut=False) if gates else self


def _norm(
    line: Line, block: Any, x: torch.Tensor, modulation: _Modulation, input_scale: Maybe
) -> tuple[Any, _Modulation]:
    """``attention_norm1(x) * (1.0 + scale_msa)`` and the tanh of both gates as one site.

    Quantised where a scale is given.
    """
    norm, scale, gates = block.attention_norm1, modulation.scale_msa, modulation.shut_gates()
    if not is_plain_rms_norm(norm):
        line.declined[why_not_rms_norm("attention_norm1", norm) or CHANGED] += 1
        normed = norm(x) if scale is None else norm(x) * (1.0 + scale)
        return normed, modulation.opened(tuple(gate if gate is None else gate.tanh() for gate in gates))
    quantised = _quantised(gates, input_scale)
    results = line.site(x, norm._parameters["weight"], scale, norm.eps, *(quantised or gates))
    normed, opened = (results[0], results[1:]) if gates else (results, ())
    return as_input(normed, input_scale, x), modulation.opened(opened)


def _quantised(gates: tuple[Maybe, ...], input_scale: Maybe) -> tuple[Maybe, ...]:
    """How the arguments of a site end that also quantises; none where it does not."""
    return () if input_scale is None else (*(gates or (None, None)), input_scale)


_AROUND_ATTENTION = ("attention_norm2", "ffn_norm1")
_AFTER_FEED_FORWARD = ("ffn_norm2",)


def _residual_norm(
    line: Line, block: Any, x: torch.Tensor, gate: Maybe, branch: torch.Tensor, scale: Maybe, input_scale: Maybe
) -> tuple[torch.Tensor, Any]:
    """``x + gate * attention_norm2(branch)`` and ``ffn_norm1(that) * (1.0 + scale)`` as one site.

    The norm is quantised where an ``input_scale`` is given.
    """
    norms = plain_weights(block, _AROUND_ATTENTION)
    if norms is None:
        line.declined[why_not_weights(block, _AROUND_ATTENTION) or CHANGED] += 1
        normed = block.attention_norm2(branch)
        x = x + (normed if gate is None else gate * normed)
        return x, block.ffn_norm1(x) if scale is None else block.ffn_norm1(x) * (1.0 + scale)
    (weight, next_weight), eps = norms
    input_scale = where_plain(input_scale, x, gate, branch, weight, next_weight, scale)
    x, scaled = line.site(x, gate, branch, weight, next_weight, scale, eps, *_quantised((), input_scale))
    return x, as_input(scaled, input_scale, x)


def _residual_next_norm(
    line: Line,
    block: Any,
    x: torch.Tensor,
    gate: Maybe,
    branch: torch.Tensor,
    following: Any,
    modulation: _Modulation,
    input_scale: Maybe,
) -> tuple[torch.Tensor, torch.Tensor, _Modulation, Maybe]:
    """``x + gate * ffn_norm2(branch)``, and of the next block what ``_norm`` stands for, as one site.

    Returns the stream, its norm, the modulation and the scale that the norm is quantised with, if it is.
    """
    norm, next_norm = block.ffn_norm2, following.attention_norm1
    weights = norm._parameters["weight"], next_norm._parameters["weight"]
    gates, scale = modulation.shut_gates(), modulation.scale_msa
    input_scale = where_plain(input_scale, x, gate, branch, *weights, scale)
    quantised = _quantised(gates, input_scale)
    x, normed, *opened = line.site(x, gate, branch, *weights, scale, norm.eps, *(quantised or gates))
    return x, normed, modulation.opened(tuple(opened)), input_scale


def _weights(block: Any) -> Iterator[Maybe]:
    """The weights of the block's first lines: its first norm's, and its modulation's if it has one."""
    yield from weights_of(block.attention_norm1)
    if block.modulation:
        yield from weights_of(block.adaLN_modulation)


def _first_lines_may_run_early(block: Any, before: Any, x: torch.Tensor, sources: tuple[Maybe, ...]) -> bool:
    """Whether the modulation and the first norm of ``block`` give now, at the end of ``before``, what they will."""
    norm, norm_before = block.attention_norm1, before.ffn_norm2
    if not (is_plain_rms_norm(norm) and is_plain_rms_norm(norm_before) and norm.eps == norm_before.eps):
        return False
    if not may_run_early(norm, x):
        return False
    given = [source for source in sources if source is not None]
    return not block.modulation or (bool(given) and all(may_run_early(block.adaLN_modulation, s) for s in given))


def _residual(line: Line, block: Any, x: torch.Tensor, gate: Maybe, branch: torch.Tensor) -> torch.Tensor:
    """``x + gate * ffn_norm2(branch)`` as one site."""
    norms = plain_weights(block, _AFTER_FEED_FORWARD)
    if norms is None:
        line.declined[why_not_weights(block, _AFTER_FEED_FORWARD) or CHANGED] += 1
        normed = block.ffn_norm2(branch)
        return x + (normed if gate is None else gate * normed)  # type: ignore[no-any-return]
    (weight,), eps = norms
    result: torch.Tensor = line.site(x, gate, branch, weight, None, None, eps)
    return result


def _modulation(
    block: Any,
    seq_len: int,
    adaln_input: torch.Tensor | None,
    noise_mask: torch.Tensor | None,
    adaln_noisy: torch.Tensor | None,
    adaln_clean: torch.Tensor | None,
) -> _Modulation:
    """What modulates one block, the gates still shut but where a noise mask chooses between two modulations per token.

    There their tanh is done before the choice, on a row a sample, as diffusers does. It adds the one to the scales
    before the choice, too; after it gives the same bits.
    """
    if not block.modulation:
        return _Modulation()
    if noise_mask is None:
        scale_msa, gate_msa, scale_mlp, gate_mlp = block.adaLN_modulation(adaln_input).unsqueeze(1).chunk(4, dim=2)
        return _Modulation(scale_msa, gate_msa, scale_mlp, gate_mlp, shut=True)
    noisy = block.adaLN_modulation(adaln_noisy).chunk(4, dim=1)
    clean = block.adaLN_modulation(adaln_clean).chunk(4, dim=1)
    noisy = noisy[0], noisy[1].tanh(), noisy[2], noisy[3].tanh()
    clean = clean[0], clean[1].tanh(), clean[2], clean[3].tanh()
    chosen = (
        theirs.select_per_token(of_noisy, of_clean, noise_mask, seq_len)
        for of_noisy, of_clean in zip(noisy, clean, strict=True)
    )
    return _Modulation(*chosen)


_PROJECTIONS = ("to_q", "to_k", "to_v")
_HALVES = ("w1", "w3")


def _write_block(
    number: int, look: LookAhead, readers: Readers, block: Any, original: Function, lines: Mapping[str, Line]
) -> Function:
    attention_norm1, attention_norm2, ffn_norm2 = lines.values()
    look.add(number, block)

    def forward(
        x: torch.Tensor,
        attn_mask: torch.Tensor | None,
        freqs_cis: torch.Tensor,
        adaln_input: torch.Tensor | None = None,
        noise_mask: torch.Tensor | None = None,
        adaln_noisy: torch.Tensor | None = None,
        adaln_clean: torch.Tensor | None = None,
    ) -> Any:
        sources = adaln_input, noise_mask, adaln_noisy, adaln_clean
        ahead = look.take(number, (*sources, *_weights(block)), x.device)
        modulation = _modulation(block, x.shape[1], *sources) if ahead is None else ahead.modulation
        norm, attn_in = block.attention_norm1, None
        arguments = {"attention_mask": attn_mask, "freqs_cis": freqs_cis}
        input_scale = readers.scale(block.attention, **arguments)
        if input_scale is not None:
            # A norm that is not plain gives a tensor.
            weight = norm._parameters["weight"] if is_plain_rms_norm(norm) else None
            input_scale = None if weight is None else where_plain(input_scale, x, weight, modulation.scale_msa)
        if ahead is not None:
            attn_in = ahead.stream("x", x, norm.eps if is_plain_rms_norm(norm) else None, input_scale)
            attn_in = None if attn_in is None else as_input(attn_in, input_scale, x)
            look.settle(number, attn_in is not None)
        if attn_in is None:
            attn_in, modulation = _norm(attention_norm1, block, x, modulation, input_scale)
        _, gate_msa, scale_mlp, gate_mlp, _ = modulation
        attn_out = readers.call(block.attention, attn_in, **arguments)
        del attn_in
        ffn_scale = readers.scale(block.feed_forward)
        x, ffn_in = _residual_norm(attention_norm2, block, x, gate_msa, attn_out, scale_mlp, ffn_scale)
        branch = readers.call(block.feed_forward, ffn_in)
        del ffn_in

        following, ahead = look.following(number, block, x), None
        if following is not None and _first_lines_may_run_early(
            following, block, x, (adaln_input, adaln_noisy, adaln_clean)
        ):
            modulation = _modulation(following, x.shape[1], *sources)
            ahead = look.begin(number + 1, (*sources, *_weights(following)), modulation, x.device)
        if ahead is None:
            return _residual(ffn_norm2, block, x, gate_mlp, branch)
        input_scale = readers.scale(following.attention, **arguments)
        x, normed, ahead.modulation, input_scale = _residual_next_norm(
            ffn_norm2, block, x, gate_mlp, branch, following, modulation, input_scale
        )
        look.put(ahead, "x", x, normed, following.attention_norm1.eps, input_scale)
        return x

    def why_tensor(part: str, linears: tuple[str, ...], norms: str | None) -> str | None:
        """Why the FP8 linears of a part get a tensor: what their norms have to say, or the part."""
        module = getattr(block, part)
        return norms or readers.why_not(part, module, linears) if read_by_fp8(module, linears) else None

    attention_norm1.watch = lambda: (
        why_not_rms_norm("attention_norm1", block.attention_norm1) or (AHEAD if number > 0 else None)
    )
    attention_norm2.watch = lambda: why_not_weights(block, _AROUND_ATTENTION)
    ffn_norm2.watch = lambda: why_not_weights(block, _AFTER_FEED_FORWARD)
    attention_norm1.why_tensor = lambda: why_tensor(
        "attention", _PROJECTIONS, why_not_rms_norm("attention_norm1", block.attention_norm1)
    )
    attention_norm2.why_tensor = lambda: why_tensor("feed_forward", _HALVES, why_not_weights(block, _AROUND_ATTENTION))
    return forward


_HEAD_NORMS = ("norm_q", "norm_k")
_PROCESSOR_TAKES = {"freqs_cis"}
_NO_SECOND_STREAM = (None,) * 6


def _closed_up(table: Any) -> Any:
    """The same table ``(B, S, D)`` with no gap between its samples.

    diffusers cuts it out of a longer one, whose length depends on the text before it was padded: every length of a
    prompt would be a signature of its own, although the values that are used are laid out alike.
    """
    samples, rows, width = table.shape
    if table.stride(0) == rows * width or capture.tracing():
        return table
    # The first stride of one sample means nothing, so nothing is copied for it.
    return table[0].unsqueeze(0) if samples == 1 else table.contiguous()


def _write_attention(
    readers: Readers, around: tuple[nn.Module, ...], attn: Any, original: Function, lines: Mapping[str, Line]
) -> Function:
    line = lines["qk"]
    project = Projections(lines["qkv"], SideBySide(attn, _PROJECTIONS, around))
    attend = Attend(lines["attention"], attn, theirs)

    def why_not() -> str | None:
        return why_not_processor(attn, Processor) or why_not_weights(attn, _HEAD_NORMS)

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        processor = attn.processor
        known = type(processor) is Processor and kwargs.keys() <= _PROCESSOR_TAKES
        table = kwargs.get("freqs_cis")
        norms = plain_weights(attn, _HEAD_NORMS)
        if not known or norms is None or getattr(table, "ndim", 0) != 3:
            # A part that the user set, or a call about which diffusers has something to say.
            reason = why_not() or (NO_TABLE if known else OTHER_ARGUMENTS)
            for part in lines.values():
                part.declined[reason] += 1
            return original(
                hidden_states, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask, **kwargs
            )
        heads = (attn.heads, -1)
        # Of what is quantised already no plain products are joined.
        projected = project(hidden_states) if isinstance(hidden_states, torch.Tensor) else None
        if isinstance(projected, torch.Tensor):
            query, key, value = torch.unflatten(projected, -1, (3, *heads)).unbind(2)
        else:
            query = attn.to_q(hidden_states).unflatten(-1, heads)
            key = attn.to_k(hidden_states).unflatten(-1, heads)
            value = attn.to_v(hidden_states).unflatten(-1, heads)
        weights, eps = norms
        table = _closed_up(table)
        query, key = line.site(query, key, None, *weights, table, *_NO_SECOND_STREAM, eps, "diffusers")
        # diffusers casts the key to the query's own dtype here, which its RoPE has left as it was
        key = key.to(query.dtype)

        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        joint = attend(query, key, value, attention_mask)
        output = attn.to_out[0](joint.flatten(2, 3).to(query.dtype))
        return attn.to_out[1](output) if len(attn.to_out) > 1 else output  # dropout

    def why_not_quantised(arguments: Mapping[str, Any] | None) -> str | None:
        """Why ``forward`` would not answer such a call of the block with its own lines."""
        if type(attn.processor) is not Processor or plain_weights(attn, _HEAD_NORMS) is None:
            return why_not() or CHANGED
        return NO_TABLE if arguments is not None and getattr(arguments["freqs_cis"], "ndim", 0) != 3 else None

    readers.add(Reader(attn, _PROJECTIONS, why_not_quantised, forward))
    line.watch = why_not
    lines["qkv"].watch = lambda: why_not() or project.why_not()
    lines["attention"].watch = lambda: why_not() or attend.why_not()
    return forward


def _write_feed_forward(readers: Readers, feed_forward: Any, original: Function, lines: Mapping[str, Line]) -> Function:
    line, product = lines[""], Product(lines["product"], feed_forward, _HALVES, biased=False)

    def why_not() -> str | None:
        if "_forward_silu_gating" in feed_forward.__dict__:
            return "the module's _forward_silu_gating was replaced on the instance, which wins over ours"
        return None

    def forward(x: Any) -> Any:
        reason = why_not()
        if reason is not None:
            line.declined[reason] += 1
            product.pass_on(reason)
            return original(x)
        last = feed_forward.w2
        if input_scale_of(last) is not None:
            product.pass_on(QUANTISED_AFTER)
        elif (gated := product(x)) is not None:
            return last(gated)
        gate, values = feed_forward.w1(x), feed_forward.w3(x)
        scale = where_plain(input_scale_of(last), gate, values)
        if scale is None or not may_quantise():
            x = line.site(gate, values)
        else:
            x = as_input(line.site(gate, values, scale), scale, gate)
        del gate, values  # the two largest activations of the block
        return last(x)

    def why_tensor() -> str | None:
        return why_no_input_scale("w2", feed_forward.w2) if holds_fp8([feed_forward.w2]) else None

    def why_no_product() -> str | None:
        quantised = QUANTISED_AFTER if input_scale_of(feed_forward.w2) is not None else None
        return why_not() or quantised or product.why_not()

    readers.add(Reader(feed_forward, _HALVES, lambda arguments: why_not(), forward))
    line.watch = lambda: why_not() or product.why_not_alone()
    line.why_tensor = why_tensor
    lines["product"].watch = why_no_product
    return forward


_BLOCK_SOURCES = (
    source(Block, "forward", "0010ab78ad4019c99d7773876ada3a22af1b0d6e2b5eb0824613d873bde13b35"),
    RMS_NORM_SOURCE,
)
_BLOCK_SITES = (
    ("attention_norm1", "rms_norm_scale"),
    ("attention_norm2", "gated_residual_rms_norm"),
    ("ffn_norm2", "gated_residual_rms_norm"),
)

ATTENTION = Replacement(
    of=Attention,
    sources=(
        ATTENTION_SOURCE,
        source(Processor, "__call__", "f8f65d350a61795747f1012c37a8188ca4651b312320caf7c784b135ae4e0354"),
        RMS_NORM_SOURCE,
    ),
    sites=(("qkv", "joint_projection"), ("qk", "qk_norm_rope"), ("attention", "attention")),
    write=partial(_write_attention, Readers(), ()),
)


FEED_FORWARD = Replacement(
    of=FeedForward,
    sources=(
        source(FeedForward, "forward", "1e3484a026a24699fcb095413edbd22570eadac9d9c433d95dbcc5eb5d98181b"),
        source(FeedForward, "_forward_silu_gating", "4af06261e665f60e1c13b1f1e40b1b10d2f339010ce46a0431c208b7644c4609"),
    ),
    sites=(("product", "linear_swiglu"), ("", "swiglu")),
    write=partial(_write_feed_forward, Readers()),
)


def _places(model: Any, rounding: str | None = None, where: Any = None) -> Iterator[tuple[str, nn.Module, Replacement]]:
    readers = Readers()
    feed_forward = replace(FEED_FORWARD, write=partial(_write_feed_forward, readers))
    for stack in ("noise_refiner", "context_refiner", "siglip_refiner", "layers"):
        if stack == "context_refiner":
            yield "cap_embedder.0", model.cap_embedder[0], RMS_NORM
        if stack == "siglip_refiner" and model.siglip_embedder is not None:
            yield "siglip_embedder.0", model.siglip_embedder[0], RMS_NORM
        look = LookAhead()
        for number, wrapped in enumerate(getattr(model, stack) or ()):
            block, path = unwrapped(wrapped), f"{stack}.{number}"
            yield (
                path,
                block,
                Replacement(Block, _BLOCK_SOURCES, _BLOCK_SITES, partial(_write_block, number, look, readers)),
            )
            attention = replace(ATTENTION, write=partial(_write_attention, readers, (model, block)))
            yield f"{path}.attention", block.attention, attention
            yield f"{path}.feed_forward", block.feed_forward, feed_forward


FAMILY = Family("z-image", theirs.ZImageTransformer2DModel, _places)
