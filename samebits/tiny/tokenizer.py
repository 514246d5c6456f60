"""The tokenizer of the embedded pipelines: the real Qwen2 class over a small vocabulary that is made here.

Byte-level BPE: every byte is a token, so every text can be encoded, and each word below is one token more.
The words are those of the prompt template of ``QwenImagePipeline``: that pipeline throws away the first 34 tokens,
which with Qwen's vocabulary are exactly the template's head. With ours they are, too.
"""

from __future__ import annotations

from itertools import pairwise

from transformers import Qwen2Tokenizer

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens that no text can spell. Their order decides their ids, from 256 + the number of merges on."""

_AFTER_A_SPACE = (
    *("the", "image", "by", "detailing", "color", "shape", "size", "texture", "quantity", "text", "spatial"),
    *("relationships", "of", "objects", "and", "background", "a"),
)
_BARE = ("Describe", "system", "user", "assistant")

CHAT_TEMPLATE = (
    r"{% for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}"
    r"{{ '<|im_start|>assistant\n' }}"
    r"{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    r"{% endif %}"
)
"""The plain part of Qwen3's chat template: roles, an opened answer, and a closed thought when none is wanted."""


def byte_alphabet() -> list[str]:
    """Return the 256 printable characters that byte-level BPE writes for the bytes 0 to 255.

    Visible Latin-1 characters stand for themselves; the others are moved up to the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(moved)) for byte in range(256)]


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer: a few hundred tokens, right-padded with ``<|endoftext|>``, no file and no download."""
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    merges: list[tuple[str, str]] = []
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    # A word grows from its left end, one character a merge. Words after a space come first: a lower rank merges
    # earlier, so that no piece of a bare word can be cut out of the middle of them.
    for word in (*(space + word for word in _AFTER_A_SPACE), *_BARE):
        for end, _ in pairwise(range(1, len(word) + 1)):
            merge = (word[:end], word[end])
            if merge not in merges:
                merges.append(merge)
                vocabulary[word[: end + 1]] = len(vocabulary)
    for token in SPECIAL:
        vocabulary[token] = len(vocabulary)
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=32_768,
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )
