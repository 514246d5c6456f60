"""``samebits profile``: what one forward of a denoiser launches, eager beside ours, and what is left to fuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("model")
@click.option("--size", type=click.IntRange(16), help="Side of the picture in pixels [1024; embedded: 256].")
@click.option("--batch", type=click.IntRange(1, 64), default=1, show_default=True, help="For z-image and qwen-image.")
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option("--chart", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw a PNG of it.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="How many kinds of chains to list.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of tables.")
def profile(
    model: str, size: int | None, batch: int, device: str | None, chart: Path | None, top: int, as_json: bool
) -> None:
    """Account for every launch of one denoising step of MODEL: eager beside samebits.

    MODEL is z-image or qwen-image (real size, random weights, nothing to download), a hub id, a local folder,
    tiny-qwen-image or tiny-z-image. Without a GPU the first two are tiny ones, and the figures mean nothing.

    Exit code 0: bits equal. 1: they differ, and no time of ours is shown. 2: usage.
    """
    _check_chart(chart)
    import torch

    from samebits.bench import models
    from samebits.loading.device import find_device

    random = model in models.BUILDERS
    if batch != 1 and not random:
        raise click.UsageError(f"--batch is for {' and '.join(models.BUILDERS)}; {model} paints one picture.")
    if random and size is not None and size % models.SIZE_MULTIPLE:
        raise click.UsageError(f"--size {size}: expected a multiple of {models.SIZE_MULTIPLE} pixels")
    where = find_device(device)
    cuda = where.type == "cuda"
    source = None
    if not random:
        from samebits.loading import find

        source = find(model, models.BUILDERS)
        source.check_size(size or source.side, size or source.side)
    side = size or (source.side if source is not None else 1024 if cuda else models.SMALL_SIZE)

    from samebits.bench import profile as run
    from samebits.bench import profile_tables
    from samebits.bench.comparing import Bench
    from samebits.bench.timing import WallStopwatch
    from samebits.ops import OPS

    def say(text: str) -> None:
        click.echo(text, err=True)

    say(f"{model}: building")
    with torch.no_grad():
        subject = _random(model, where, side, batch) if source is None else _of_pipeline(source, where, side)
        bench = Bench.on(where, say) if cuda else Bench(where, WallStopwatch(), 1 << 20, say)
        say(f"{model}: profiling")
        pictures = f"{side}x{side}" + (f", batch {batch}" if batch > 1 else "")
        gpu = torch.cuda.get_device_name(where) if cuda else "a CPU"
        found = run.measure(subject, bench, OPS, f"{pictures} on {gpu}")
    drawn = _draw(found, chart, cuda)
    if as_json:
        click.echo(json.dumps({**found.to_json(), "meaningful": cuda}, indent=2, allow_nan=False))
    else:
        click.echo("\n" + profile_tables.profile_table(found, top))
        if not cuda:
            click.echo("\nThere is no GPU here: operators of a CPU are counted instead, and the figures mean nothing.")
        if drawn is not None:
            click.echo(f"\nwritten: {drawn}")
    click.get_current_context().exit(0 if found.bits_equal else 1)


def _check_chart(chart: Path | None) -> None:
    """Refuse a chart that could not be drawn or written at the end."""
    if chart is None:
        return
    if chart.suffix.lower() != ".png":
        raise click.UsageError(f"--chart {chart}: expected a file name that ends in .png.")
    if not chart.parent.is_dir():
        raise click.UsageError(f"--chart {chart}: the folder {chart.parent} does not exist. Make it first.")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise click.UsageError('--chart needs matplotlib; pip install "samebits[bench]" brings it.')


def _draw(found: Any, chart: Path | None, cuda: bool) -> Path | None:
    if chart is None:
        return None
    from samebits.bench import charts
    from samebits.bench.profile import charted

    bars, lines = charted(found)
    title = f"{found.name}, {found.where}" + ("" if cuda else " (these figures mean nothing)")
    return charts.stacked_chart(bars, chart, title, lines)


def _random(name: str, device: Any, side: int, batch: int) -> Any:
    """A denoiser with random weights, of real size on a GPU and a small one elsewhere."""
    from samebits.bench import models
    from samebits.bench.profile import Subject

    builders = models.BUILDERS if device.type == "cuda" else models.SMALL
    denoiser = models.at_size(builders[name](device), side, batch)
    return Subject(name, denoiser.model, denoiser.forward)


def _of_pipeline(source: Any, device: Any, side: int) -> Any:
    """The denoiser of a pipeline, with what it was called with at the last of a few steps of a picture."""
    import torch

    from samebits.bench.profile import Subject
    from samebits.cli._screen import quiet
    from samebits.loading import load

    kept: list[tuple[Any, Any]] = []
    with quiet(False):
        loaded: Any = load(source, torch.bfloat16, device)
        loaded.set_progress_bar_config(disable=True)
        model = loaded.transformer

        def keep(module: Any, args: Any, kwargs: Any) -> None:
            kept[:] = [(args, kwargs)]

        hook = model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            loaded(
                prompt="a red fox in snow",
                width=side,
                height=side,
                num_inference_steps=max(2, source.fewest_steps),
                output_type="latent",
                generator=torch.Generator("cpu").manual_seed(0),
                **source.guidance(None, None),
            )
        finally:
            hook.remove()
    ((args, kwargs),) = kept
    return Subject(source.model, model, lambda: model(*args, **{**kwargs, "return_dict": False}))
