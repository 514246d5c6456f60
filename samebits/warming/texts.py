"""Texts of a given length for a pipeline, as the rows that its text encoder makes.

The encoder runs once for a long text, and every shorter one is its beginning: what the denoiser sees has the shape, the
dtype and the memory layout of the real thing, and the values of real words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    def mixtures(self, lengths: Iterable[int], batch: int) -> list[tuple[int, ...]]:
        """Batches of unlike texts that have shapes which no batch of equal ones has.

        Z-Image norms the texts of a batch as one long row of padded tokens, so what counts is their sum. Qwen-Image
        pads to the longest: a mixture looks like a batch of that.
        """
        if self.padding == 1 or batch == 1:
            return []
        padded = {-(-length // self.padding): length for length in lengths}
        reached: dict[int, tuple[int, ...]] = {0: ()}
        for _ in range(batch):
            further: dict[int, tuple[int, ...]] = {}
            for total, texts in reached.items():
                for units, length in padded.items():
                    further.setdefault(total + units, (*texts, length))
            reached = further
        equal = {batch * units for units in padded}
        return [texts for total, texts in sorted(reached.items()) if total not in equal]

    def arguments(self, texts: Sequence[torch.Tensor], negative: torch.Tensor | None) -> dict[str, Any]:
        """What to hand to the pipeline's call in place of as many prompts.

        Parameters
        ----------
        texts : sequence of Tensor
            The rows ``(T, D)`` of each. For Qwen-Image they are of one length.
        negative : Tensor or None
            The rows of the negative prompt, which is the same for all.
        """
        found: dict[str, Any] = {"max_sequence_length": self.most}
        for prefix, rows in (("", list(texts)), ("negative_", [] if negative is None else [negative] * len(texts))):
            if rows and self._qwen:
                found[f"{prefix}prompt_embeds"] = torch.stack(rows)
                shape = found[f"{prefix}prompt_embeds"].shape[:2]
                found[f"{prefix}prompt_embeds_mask"] = torch.ones(shape, dtype=torch.long, device=rows[0].device)
            elif rows:
                found[f"{prefix}prompt_embeds"] = [one.clone() for one in rows]
        return found
