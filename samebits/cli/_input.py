"""The options of ``samebits generate`` and what can be wrong with them by themselves."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import click

from samebits import tiny

PROMPT = "a red fox in snow"
"""For the embedded models, where none is given."""

_LONGEST_PROMPT_BYTES = 1 << 20


def parse_size(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Read ``WIDTHxHEIGHT``; a callback of click."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})[xX]([0-9]{1,6})", value.strip())
    if found is None:
        raise click.BadParameter(f"expected WIDTHxHEIGHT in pixels, such as 1024x768, got {value!r}.")
    return int(found[1]), int(found[2])


@dataclass
class Options:
    """What was asked for, as click read it."""

    model: str
    prompt: str | None
    prompt_file: Path | None
    negative_prompt: str | None
    steps: int | None
    size: tuple[int, int] | None
    seed: int
    guidance: float | None
    dtype: str
    device: str | None
    offload: str
    output: Path | None
    force: bool
    prove: bool
    eager: bool
    host: bool
    strict: bool
    cuda_graphs: bool
    recheck_every: int | None
    as_json: bool


def find_prompt(options: Options) -> str:
    if options.prompt is not None and options.prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other.")
    text = options.prompt
    if options.prompt_file is not None:
        text = _read_prompt(options.prompt_file)
    if text is None:
        if options.model not in tiny.NAMES:
            raise click.UsageError("expected what to paint: -p TEXT or --prompt-file FILE.")
        text = PROMPT
    for words, name in ((text, "the prompt"), (options.negative_prompt, "the negative prompt")):
        _check_text(words or "", name)
    if not text.strip():
        where = f"the file {options.prompt_file}" if options.prompt_file else "the prompt"
        raise click.UsageError(f"{where} is empty; expected what to paint.")
    return text


def _check_text(text: str, name: str) -> None:
    """Refuse an argument of bytes that are no text; Python hands such bytes on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text (character {error.start}).") from None


def _read_prompt(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST_PROMPT_BYTES + 1)
        if len(raw) > _LONGEST_PROMPT_BYTES:
            raise click.UsageError(f"{path}: longer than 1 MiB; expected a prompt.")
        return raw.decode("utf-8-sig").strip()
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path}: is not UTF-8 text (byte {error.start}).") from None


def check_combinations(options: Options) -> None:
    for name in ("prove", "host", "strict", "cuda_graphs", "recheck_every"):
        if options.eager and getattr(options, name):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--eager and --{flag} exclude each other: --eager applies nothing.")
    if options.guidance is not None and not (math.isfinite(options.guidance) and options.guidance >= 0):
        raise click.BadParameter(f"expected a number from 0 up, got {options.guidance}.", param_hint="--guidance")
    if options.host and options.device is not None and not options.device.startswith("cpu"):
        raise click.UsageError(f"--host runs on the CPU and --device {options.device} does not. Leave one out.")
