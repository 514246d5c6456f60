"""``samebits bench pipeline``: a whole picture, which part of it takes what share, and what the first one costs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.cli._bench import COMMIT, folder_of, leave, report, say

if TYPE_CHECKING:
    import torch

    from samebits.bench.pictures import Timed
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
@click.option("--cuda-graphs", is_flag=True, help="samebits' pictures with the denoiser replayed from CUDA graphs.")
@click.option(
    "--cold/--no-cold",
    default=None,
    help="In fresh processes, with nothing compiled and then with everything [with a GPU: yes]; else once, right here.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for pipeline.json [for qwen-image and z-image on a GPU: evidence/<name of the GPU>; else none].",
)
@click.option("--add", is_flag=True, help="Keep the pictures of pipeline.json that this run does not paint again.")
@COMMIT
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of a table.")
def pipeline(
    model: str,
    prompt: str,
    steps: int | None,
    size: int | None,
    seed: int,
    device: str | None,
    cuda_graphs: bool,
    cold: bool | None,
    out: Path | None,
    add: bool,
    commit: str | None,
    as_json: bool,
) -> None:
    """A whole picture, eager and samebits: the share of text encoder, denoiser, VAE and the rest.

    MODEL is a hub id, a local folder, qwen-image or z-image (real size, random weights, nothing to download; without
    guidance), tiny-qwen-image (the default) or tiny-z-image. What is left when the denoiser is at its floor is to be
    seen here, and what the first picture after apply costs, with kernels that are compiled already and without.
    """
    from samebits.loading import Source, find

    random = model in RANDOM
    source = Source(model, RANDOM[model], None, False, False, 16, 4096, 2) if random else find(model, RANDOM)
    side, steps = size or source.side, steps or (RANDOM_STEPS if random else source.steps)
    source.check_size(side, side)
    source.check_steps(steps)
    from samebits.bench import forwards, pictures, pipelines
    from samebits.cli._screen import quiet
    from samebits.errors import EvidenceError
    from samebits.loading.device import find_device

    where = find_device(device)
    cuda = where.type == "cuda"
    if random and not cuda:
        raise click.UsageError(f"{model} has its real size and needs a GPU; tiny-{model} runs on a CPU.")
    if not cuda and (out is not None or add or cold):
        raise click.UsageError("--out, --add and --cold are about what a GPU does, and this is none.")
    if cold is False and (out is not None or add):
        raise click.UsageError("--no-cold measures with whatever kernels are compiled already, which is no record.")
    apart = cuda and cold is not False
    kept = apart and (random or out is not None)
    if add and not kept:
        raise click.UsageError(f"--add adds to a record, and {model} leaves one with --out only.")
    request = pipelines.Request(
        model,
        partial(_build, model) if random else partial(_load, source),
        str(where),
        {
            "prompt": prompt,
            "width": side,
            "height": side,
            "num_inference_steps": steps,
            **source.guidance(0.0 if random else None, None),
        },
        seed,
        cuda_graphs,
        partial(quiet, False),
    )
    mode = pipelines.GRAPHS if cuda_graphs else pipelines.PLAIN
    options = [*(["--cuda-graphs"] if cuda_graphs else []), *(["--seed", str(seed)] if seed else [])]
    command = " ".join(["samebits bench pipeline", model, f"--size {side} --steps {steps}", *options])
    try:
        place = _Place(command, out, commit, add) if kept else None
    except EvidenceError as error:  # the file that rows were to be added to
        raise click.UsageError(str(error)) from error
    first: Timed | None = None
    if apart:
        first, timed = pipelines.cold_and_warm(request, say)
    else:
        timed = pipelines.here(request, say)
    written = ""
    if place is not None and first is not None:
        written = place.keep(pipelines.rows_of(model, side, steps, mode, first, timed))
    cache = pictures.UNKNOWN if first is None else pictures.WARM
    seen = [(timed, cache), (first, pictures.COLD)]
    if as_json:
        document = {
            "model": model,
            "device": str(where),
            "size": side,
            "steps": steps,
            "mode": mode,
            "meaningful": cuda and not source.embedded,
            "first_picture": [pictures.first_picture_json(one, state) for one, state in seen if one is not None],
            **timed.to_json(),
        }
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(f"{model} on {where}, bf16, {side}x{side}, {steps} steps, seed {seed}, {mode}\n")
        click.echo(pictures.pictures_table(timed, first, cache))
        if not cuda:
            click.echo(forwards.MEANINGLESS if source.embedded else "On a CPU these figures mean nothing.")
        elif source.embedded:
            click.echo("The embedded models are tiny: the shares say nothing about a real one.")
        if written:
            click.echo(f"\n{written}")
    leave(timed.bits_equal and (first is None or first.bits_equal))


class _Place:
    """Where the record goes. Looked at before anything is painted, so that no picture is lost to a file that is off."""

    def __init__(self, command: str, out: Path | None, commit: str | None, add: bool) -> None:
        from samebits.bench import evidence
        from samebits.environment import fingerprint
        from samebits.ops import OPS

        self.folder = folder_of(out)
        self.command, self.environment = command, fingerprint()
        self.source = evidence.source_of(OPS, commit)
        path = self.folder / "pipeline.json"
        self.earlier = evidence.earlier(path, self.source, self.environment) if add and path.exists() else None

    def keep(self, rows: list[dict[str, Any]]) -> str:
        """Write the record and its page; a sentence that says what lies where."""
        from samebits.bench import pipelines

        made = pipelines.record(rows, self.command, self.environment, self.source, self.earlier)
        made.write(self.folder)
        return report(self.folder, "pipeline", pipelines.targets(made.rows))


def _load(source: Source, device: torch.device) -> Any:
    import torch

    from samebits.loading import load

    return load(source, torch.bfloat16, device)


def _build(model: str, device: torch.device) -> Any:
    from samebits.bench import real

    say(f"{model}: building, with random weights")
    return real.build(model, device)
