"""``samebits bench pipeline``: a whole picture, and which part of it takes what share of the time."""

from __future__ import annotations

import json

import click

from samebits.cli._bench import leave, say


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

    MODEL is a hub id, a local folder, tiny-qwen-image (the default) or tiny-z-image. What is left when the denoiser
    is at its floor is to be seen here.
    """
    from samebits.loading import find

    source = find(model)
    side, steps = size or source.side, steps or source.steps
    source.check_size(side, side)
    source.check_steps(steps)
    import torch

    from samebits.bench import forwards, pictures
    from samebits.cli._screen import quiet
    from samebits.loading import load
    from samebits.loading.device import find_device

    where = find_device(device)
    cuda = where.type == "cuda"
    wait = torch.cuda.synchronize if cuda else _nothing
    arguments = {"prompt": prompt, "width": side, "height": side, "num_inference_steps": steps}
    with quiet(False):
        loaded = load(source, torch.bfloat16, where)
        loaded.set_progress_bar_config(disable=True)
        timed = pictures.measure(
            loaded,
            {**arguments, **source.guidance(None, None)},
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


def _nothing() -> None:
    """What waiting for a CPU takes."""
