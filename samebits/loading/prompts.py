"""Says which part of a prompt a pipeline will not read: diffusers cuts what is too long, and says nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

_SHOWN_TOKENS = 12
"""So many of the tokens that are cut off are shown, so that a reader finds the place."""


def cut_off(pipeline: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each text of a call of which the pipeline reads the beginning only.

    Parameters
    ----------
    pipeline : QwenImagePipeline or ZImagePipeline
        With its tokenizer; its other parts may be missing.
    arguments : mapping
        Of its call: ``prompt``, ``negative_prompt``, and ``max_sequence_length`` where that is not the default.
    """
    default = inspect.signature(type(pipeline).__call__).parameters["max_sequence_length"].default
    most = arguments.get("max_sequence_length", default)
    told = []
    for name in ("prompt", "negative_prompt"):
        text = arguments.get(name)
        if not isinstance(text, str):
            continue
        tokens, read = _tokens(pipeline, text, most)
        if len(tokens) > read:
            words = " ".join(pipeline.tokenizer.decode(tokens[read : read + _SHOWN_TOKENS]).split())
            told.append(
                f"the {name.replace('_', ' ')} is cut: with the model's template it has {len(tokens):,} tokens and "
                f"{type(pipeline).__name__} reads {read:,}; what follows is lost, from {words!r} on"
            )
    return told


def _tokens(pipeline: Any, text: str, most: int) -> tuple[list[int], int]:
    """The tokens that the pipeline makes of a text, and how many of them it reads."""
    tokenizer = pipeline.tokenizer
    template = getattr(pipeline, "prompt_template_encode", None)
    if template is None:  # Z-Image: a conversation, cut as a whole
        conversation = [{"role": "user", "content": text}]
        told = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return list(tokenizer(told).input_ids), most
    # Qwen-Image: what stands before the prompt is encoded with it and dropped afterwards.
    before: int = pipeline.prompt_template_encode_start_idx
    return list(tokenizer(template.format(text)).input_ids)[before:], min(most, pipeline.tokenizer_max_length)


def hollow(cls: Any, tokenizer: Any) -> Any:
    """A pipeline of this class that has a tokenizer and nothing else: enough for :func:`cut_off`."""
    names = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "tokenizer")]
    return cls(tokenizer=tokenizer, **dict.fromkeys(names))
