"""``samebits bench pipeline``: a whole picture, and which part of it takes what share of the time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from samebits.cli._bench import leave, say

if TYPE_CHECKING:
    import torch

    from samebits.loading import Source

RANDOM = {"qwen-image": "QwenImagePipeline", "z-image": "ZImagePipeline"}
"""Names of pipelines of real size with random weights, and their classes."""
RANDOM_STEPS = 9
"""Each step takes the same time, so few will do."""


@click.command()
@click.argument("model", default="tiny-qwen-image")
@click.option("-p", "--prompt", default="a red fox in snow", show_default=True, help="What to paint.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: the model's; embedded: 4].")
@click.option("--size", type=click.IntRange(16), help="Side of the picture in pixels [1024; embedded: 256].")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the initial noise.")
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of a table.")
def pipeline(
    model: str, prompt: str, steps: int | None, size: int | None, seed: int, device: str | None, as_json: bool
) -> None:
    """A whole picture, eager and samebits: the share of text encoder, denoiser, VAE and the rest.

    MODEL is a hub id, a local folder, qwen-image or z-image (real size, random weights, nothing to download; without
    guidance), tiny-qwen-image (the default) or tiny-z-image. What is left when the denoiser is at its floor is to be
    seen here.
    """
    from samebits.loading import Source, find

    random = model in RANDOM
    source = Source(model, RANDOM[model], None, False, False, 16, 4096, 2) if random else find(model)
    side, steps = size or source.side, steps or (RANDOM_STEPS if random else source.steps)
    source.check_size(side, side)
    source.check_steps(steps)
    import torch

    from samebits.bench import forwards, pictures
    from samebits.cli._screen import quiet
    from samebits.loading.device import find_device

    where = find_device(device)
    cuda = where.type == "cuda"
    if random and not cuda:
        raise click.UsageError(f"{model} has its real size and needs a GPU; tiny-{model} runs on a CPU.")
    wait = torch.cuda.synchronize if cuda else _nothing
    arguments = {"prompt": prompt, "width": side, "height": side, "num_inference_steps": steps}
    with quiet(False):
        loaded = _build(model, where) if random else _load(source, where)
        loaded.set_progress_bar_config(disable=True)
        timed = pictures.measure(
            loaded,
            {**arguments, **source.guidance(0.0 if random else None, None)},
            seed,
            wait,
            lambda text: say(f"{model}: painting, {text}"),
        )
    if as_json:
        document = {
            "model": model,
            "device": str(where),
            "size": side,
            "steps": steps,
            "meaningful": cuda and not source.embedded,
            **timed.to_json(),
        }
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(f"{model} on {where}, bf16, {side}x{side}, {steps} steps, seed {seed}\n")
        click.echo(pictures.pictures_table(timed))
        if not cuda:
            click.echo(forwards.MEANINGLESS if source.embedded else "On a CPU these figures mean nothing.")
        elif source.embedded:
            click.echo("The embedded models are tiny: the shares say nothing about a real one.")
    leave(timed.bits_equal)


def _load(source: Source, device: torch.device) -> Any:
    import torch

    from samebits.loading import load

    return load(source, torch.bfloat16, device)


def _build(model: str, device: torch.device) -> Any:
    from samebits.bench import real

    say(f"{model}: building, with random weights")
    return real.build(model, device)


def _nothing() -> None:
    """What waiting for a CPU takes."""
