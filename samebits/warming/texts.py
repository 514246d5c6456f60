"""Texts of a given length for a pipeline, as the rows that its text encoder makes.

The encoder runs once for a long text, and every shorter one is its beginning: what the denoiser sees has the shape, the
dtype and the memory layout of the real thing, and the values of real words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samebits.errors import ModelError

DEFAULT_TOKENS = 512
"""The longest text of a default run: diffusers' own ``max_sequence_length``."""
_WORDS = "a red fox in snow, painted slowly, with a lantern, two ravens and a river behind it, "


class Texts:
    """What a pipeline can be told.

    Parameters
    ----------
    pipeline : DiffusionPipeline
        A ``QwenImagePipeline`` or a ``ZImagePipeline``.

    Raises
    ------
    ModelError
        It is of another class.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.name = type(pipeline).__name__
        if self.name not in ("QwenImagePipeline", "ZImagePipeline"):
            problem = "cannot be warmed; expected a QwenImagePipeline or a ZImagePipeline"
            raise ModelError(model=self.name, problem=problem)
        self._qwen = self.name == "QwenImagePipeline"

    @property
    def padding(self) -> int:
        """Texts are padded to a multiple of so many tokens."""
        if self._qwen:
            return 1
        from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

        return int(SEQ_MULTI_OF)

    @property
    def most(self) -> int:
        """The longest text, in tokens."""
        if self._qwen:
            return int(self.pipeline.tokenizer_max_length)
        # Positions count the text, then one for the picture.
        positions = int(self.pipeline.transformer.config.axes_lens[0]) - 2
        return positions // self.padding * self.padding

    def lengths(self) -> list[int]:
        """The lengths up to :data:`DEFAULT_TOKENS` that give the denoiser shapes of their own.

        Z-Image pads to a multiple of 32, so there are few. Qwen-Image pads to the longest text of a batch and no
        further: every length from that of an empty prompt on has its own.
        """
        first = -(-len(self.rows("", DEFAULT_TOKENS)) // self.padding) * self.padding
        return list(range(first, min(DEFAULT_TOKENS, self.most) + 1, self.padding))

    def rows(self, text: str, limit: int) -> torch.Tensor:
        """Encode ``text``: ``(T, D)``, T at most ``limit``."""
        more = {} if self._qwen else {"do_classifier_free_guidance": False}
        with torch.no_grad():
            rows: torch.Tensor = self.pipeline.encode_prompt(prompt=[text], max_sequence_length=limit, **more)[0][0]
        return rows

    def long(self, tokens: int) -> torch.Tensor:
        """Encode a text of exactly ``tokens`` tokens.

        Raises
        ------
        ModelError
            The pipeline takes none that long.
        """
        if tokens > self.most:
            problem = f"takes texts of at most {self.most} tokens, not {tokens}"
            raise ModelError(model=self.name, problem=problem)
        text = _WORDS
        while True:
            rows = self.rows(text, max(tokens, self.padding))
            if len(rows) >= tokens:
                return rows[:tokens]
            text *= 2

    def negative(self, arguments: Mapping[str, Any]) -> torch.Tensor | None:
        """The rows of the negative prompt that a call with ``arguments`` uses, or ``None`` if it uses none."""
        text = arguments.get("negative_prompt")
        if self._qwen and (text is None or arguments.get("true_cfg_scale", 4.0) <= 1):
            return None
        return self.rows(text or "", DEFAULT_TOKENS)

    def arguments(self, rows: torch.Tensor, negative: torch.Tensor | None, batch: int) -> dict[str, Any]:
        """What to hand to the pipeline's call in place of ``batch`` prompts."""
        found: dict[str, Any] = {"max_sequence_length": self.most}
        for prefix, one in (("", rows), ("negative_", negative)):
            if one is not None and self._qwen:
                found[f"{prefix}prompt_embeds"] = one.unsqueeze(0).repeat(batch, 1, 1)
                ones = torch.ones(batch, len(one), dtype=torch.long, device=one.device)
                found[f"{prefix}prompt_embeds_mask"] = ones
            elif one is not None:
                found[f"{prefix}prompt_embeds"] = [one.clone() for _ in range(batch)]
        return found
