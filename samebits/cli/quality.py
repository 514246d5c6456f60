"""``samebits quality``: pictures with exact and with moved bits, how near they are, and the record that allows it."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits.cli import DIFFERENT
from samebits.cli._input import PROMPT, parse_size
from samebits.cli.generate import DTYPES

if TYPE_CHECKING:
    from samebits.quality import QualityRecord, Thresholds
    from samebits.quality.page import Shown

_LONGEST_FILE_BYTES = 8 << 20
_BYTES_OF_A_PAIR, _BYTES_OF_THE_REST = 512, 1 << 20
"""In a record's file, but for the prompts, and at most."""


@dataclass
class Run:
    """What came out so far: every pair's figures, and of the worst of them the pictures."""

    place: Any = None
    pairs: list[Any] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)

    def show(self, shown: Shown) -> None:
        """Keep a pair's pictures while it is among the worst: they are megabytes each."""
        from samebits.quality.page import MOST_PICTURES

        self.shown.append(shown)
        self.shown.sort(key=lambda each: each.badness)
        del self.shown[MOST_PICTURES:]


def read_prompts(path: Path | None, model: str) -> list[str]:
    """One prompt a line; empty lines and lines that begin with ``#`` are left out."""
    from samebits import tiny

    if path is None:
        if model not in tiny.NAMES:
            raise click.UsageError("expected what to paint: --prompts FILE, one prompt a line.")
        return [PROMPT]
    try:
        with path.open("rb") as file:
            raw = file.read(_LONGEST_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path}: is not UTF-8 text (byte {error.start}).") from None
    if len(raw) > _LONGEST_FILE_BYTES:
        raise click.UsageError(f"{path}: longer than 8 MiB; expected prompts.")
    prompts = [line.strip() for line in text.splitlines()]
    prompts = [line for line in prompts if line and not line.startswith("#")]
    if not prompts:
        raise click.UsageError(f"{path}: holds no prompt; expected one a line.")
    return prompts


def check_amount(prompts: Sequence[str], seeds: int) -> None:
    """Refuse what a record cannot hold, before anything is painted."""
    from samebits.quality.record import MAX_BYTES, MAX_PAIRS, MAX_PROMPT_CHARACTERS

    longest = max(map(len, prompts))
    if longest > MAX_PROMPT_CHARACTERS:
        raise click.UsageError(
            f"a prompt has {longest:,} characters; a record takes {MAX_PROMPT_CHARACTERS:,} at most."
        )
    number = len(prompts) * seeds
    size = seeds * sum(len(json.dumps(prompt)) for prompt in prompts) + number * _BYTES_OF_A_PAIR
    if number > MAX_PAIRS or size > MAX_BYTES - _BYTES_OF_THE_REST:
        raise click.UsageError(
            f"{len(prompts):,} prompts at {seeds:,} seeds are {number:,} pairs, more than a record takes. "
            "Fewer --seeds, or a shorter file."
        )


@click.command()
@click.argument("model")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="One prompt a line.")
@click.option("--seeds", type=click.IntRange(1, 10_000), default=4, show_default=True, help="Seeds for each prompt.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: the model's; embedded: 4].")
@click.option(
    "--size", metavar="WIDTHxHEIGHT", callback=parse_size, help="Pixels [default: 1024x1024; embedded: 256x256]."
)
@click.option("--guidance", type=float, help="Classifier-free guidance [default: the pipeline's; a Turbo: 0].")
@click.option(
    "--rounding",
    type=click.Choice(["eager", "fma"]),
    default="eager",
    show_default=True,
    help="How a late bias is added: as eager rounds, or by one native multiply-add.",
)
@click.option("--min-ssim", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="For every picture.")
@click.option("--min-psnr", type=click.FloatRange(0, 200), default=29.0, show_default=True, help="In dB, likewise.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of the activations.")
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="For the record, the contact sheet and the page [default: quality-MODEL].",
)
@click.option("--host", is_flag=True, help="On the CPU, through kernels compiled for the CPU (needs a C++ compiler).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def quality(
    model: str,
    prompts: Path | None,
    seeds: int,
    steps: int | None,
    size: tuple[int, int] | None,
    guidance: float | None,
    rounding: str,
    min_ssim: float,
    min_psnr: float,
    dtype: str,
    device: str | None,
    output: Path | None,
    host: bool,
    as_json: bool,
) -> int:
    """Measure what moving the output biases of MODEL's quantised linears does to its pictures, and keep the record.

    MODEL is a folder or hub id with FP8 or NVFP4 weights of ModelOpt. Every prompt is painted at every seed twice: with
    the bits of the unfused model, and with biases added late. The record in the cache folder is what
    apply(contract="measured") asks for.

    Exit code 0: every picture is within the thresholds. 1: one is not. 2: usage.
    """
    from samebits.loading import find
    from samebits.quality import Thresholds
    from samebits.quality.metrics import missing_packages
    from samebits.settings import settings

    missing = missing_packages()
    if missing is not None:
        raise click.UsageError(missing)
    if host and device is not None and not device.startswith("cpu"):
        raise click.UsageError(f"--host runs on the CPU and --device {device} does not. Leave one out.")
    if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
        # Pictures of NaN are black both ways, and would be recorded as identical.
        raise click.BadParameter(f"expected a number from 0 up, got {guidance}.", param_hint="--guidance")
    words = read_prompts(prompts, model)
    check_amount(words, seeds)
    folder = settings().cache_dir
    source = find(model)
    width, height = size or (source.side, source.side)
    source.check_size(width, height)
    steps = steps or source.steps
    source.check_steps(steps)
    arguments = {"width": width, "height": height, "num_inference_steps": steps, **source.guidance(guidance, None)}
    out = output or Path(f"quality-{Path(model).name or 'model'}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out, prefix=".samebits-"):
            pass
    except OSError as error:
        raise click.UsageError(f"{out}: cannot be written ({error.strerror or error}).") from None

    run = Run()
    try:
        _paint(source, arguments, words, seeds, rounding, dtype, "cpu" if host else device, host, run, as_json)
    except BaseException:
        _rescue(run, model, steps, (width, height), out)
        raise
    record = _record(run.place, model, steps, (width, height), run.pairs)
    thresholds = Thresholds(min_ssim, min_psnr)
    written = [*_keep(folder, record, out), *_pictures(out, record, thresholds, run.shown)]
    shortfall = record.why_not_within(thresholds)
    if as_json:
        names = [str(path) for path in written]
        document = {"record": names[0] if names else None, "written": names[1:], "within": shortfall is None}
        document["allowed"] = record.why_not_within(Thresholds()) is None
        document |= {"shortfall": shortfall, **record.to_json()}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        _show(record, thresholds, shortfall, written)
    return 0 if shortfall is None else DIFFERENT


def _paint(
    source: Any,
    arguments: dict[str, Any],
    prompts: Sequence[str],
    seeds: int,
    rounding: str,
    dtype: str,
    device_name: str | None,
    host: bool,
    run: Run,
    as_json: bool,
) -> None:
    """Paint every pair."""
    from samebits.cli._screen import quiet

    with quiet(False):
        import torch

        from samebits.apply import apply, place_of, why_nothing_moves
        from samebits.loading import load
        from samebits.loading.device import find_device
        from samebits.loading.prompts import cut_off
        from samebits.proof.pictures import paint
        from samebits.quality import Pair
        from samebits.quality.metrics import figures, pixels_sha256
        from samebits.quality.page import Shown

        device = find_device(device_name)
        pipeline = load(source, getattr(torch, DTYPES[dtype]), device)
        pipeline.set_progress_bar_config(disable=True)
        nothing = why_nothing_moves(pipeline)
        if nothing is not None:
            raise click.UsageError(
                f"{source.model}: {nothing}. Expected a Qwen-Image model exported by ModelOpt in FP8 or NVFP4."
            )
        for prompt in prompts:
            for warning in cut_off(pipeline, {**arguments, "prompt": prompt}):
                click.echo(f"samebits: warning: {warning}", err=True)
        run.place = place_of(pipeline, rounding)
        with _bar(as_json, len(prompts) * seeds) as advance:
            for prompt in prompts:
                for seed in range(seeds):
                    with apply(pipeline, host=host):
                        exact = paint(pipeline, {**arguments, "prompt": prompt}, seed).image
                        again = exact if run.pairs else paint(pipeline, {**arguments, "prompt": prompt}, seed).image
                    if not run.pairs and pixels_sha256(again) != pixels_sha256(exact):
                        click.echo(
                            "samebits: warning: the exact pipeline gave two pictures for one seed, so a part of every "
                            "difference is its own",
                            err=True,
                        )
                    with apply(pipeline, host=host, contract="measured", rounding=rounding, on_trial=True) as late:
                        measured = paint(pipeline, {**arguments, "prompt": prompt}, seed).image
                    if not late.moved:
                        raise click.UsageError(
                            f"{source.model}: no bias was added late, so there is nothing to measure: none of its "
                            "attention's outputs and feed-forwards is quantised and has a bias."
                        )
                    found, maps = figures(measured, exact)
                    run.pairs.append(Pair(prompt, seed, pixels_sha256(exact), pixels_sha256(measured), found))
                    decibels = "identical" if found.psnr is None else f"{found.psnr:.2f} dB"
                    caption = f"seed {seed}, SSIM {found.ssim:.4f}, {decibels}: {prompt}"
                    run.show(Shown(caption, exact, measured, maps, (found.ssim, found.db)))
                    advance()


@contextmanager
def _bar(as_json: bool, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=as_json or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("pictures, both ways", total=total)
        yield lambda: progress.advance(task)


def _record(place: Any, model: str, steps: int, size: tuple[int, int], pairs: list[Any]) -> QualityRecord:
    from samebits.certificate.record import now
    from samebits.quality import QualityRecord

    return QualityRecord(
        model=model[:4096],
        model_hash=place.model_hash,
        quantization=place.quantization,
        rounding=place.rounding,
        dtype=place.dtype,
        capability=None if place.capability is None else list(place.capability),
        environment=dict(place.environment),
        sources=dict(place.sources),
        steps=steps,
        size=list(size),
        pairs=pairs,
        command=("samebits " + " ".join(sys.argv[1:]))[:4096],
        when=now(),
    )


def _keep(folder: Path, record: QualityRecord, out: Path) -> list[Path]:
    """Write the record into the cache folder, where ``apply`` looks for it, and beside the pictures.

    Returns those that could be written. Where neither could, the record goes to standard error.
    """
    from samebits.quality import keep_record, write_record
    from samebits.quality.record import encoded

    def beside() -> Path:
        write_record(record, out / "record.json")
        return out / "record.json"

    paths: list[Path] = []
    ways: tuple[tuple[Path, Callable[[], Path]], ...] = ((folder, lambda: keep_record(folder, record)), (out, beside))
    for where, write in ways:
        try:
            paths.append(write())
        except OSError as error:
            click.echo(f"samebits: {where}: the record could not be kept ({error.strerror or error})", err=True)
    if not paths:
        click.echo(encoded(record).decode(), err=True)
    return paths


def _rescue(run: Run, model: str, steps: int, size: tuple[int, int], out: Path) -> None:
    """Write the pairs of a run that was cut short. They allow nothing, so this is no record that ``apply`` finds."""
    from samebits.quality import write_record

    if not run.pairs:
        return
    path = out / "unfinished.json"
    try:
        write_record(_record(run.place, model, steps, size, run.pairs), path)
    except OSError as error:
        click.echo(f"samebits: {path}: could not be written ({error.strerror or error})", err=True)
    else:
        click.echo(f"samebits: cut short after {len(run.pairs):,} pairs; their figures are in {path}", err=True)


def _pictures(out: Path, record: QualityRecord, thresholds: Thresholds, shown: Sequence[Shown]) -> list[Path]:
    from samebits.quality.page import page, sheet

    paths: list[Path] = []
    for path, write in (
        (out / "sheet.png", lambda path: sheet(shown).save(path)),
        (out / "quality.html", lambda path: path.write_text(page(record, thresholds, shown), encoding="utf-8")),
    ):
        try:
            write(path)
            paths.append(path)
        except OSError as error:
            click.echo(f"samebits: {path}: could not be written ({error.strerror or error})", err=True)
    return paths


def _show(record: QualityRecord, thresholds: Thresholds, shortfall: str | None, paths: Sequence[Path]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "SSIM", "PSNR dB", "FLIP", "LPIPS"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in (("worst", record.worst), ("mean", record.mean)):
        psnr = "identical" if figures.psnr is None else f"{figures.psnr:.2f}"
        lpips = "no weights here" if figures.lpips is None else f"{figures.lpips:.4f}"
        table.add_row(name, f"{figures.ssim:.4f}", psnr, f"{figures.flip:.4f}", lpips)
    gpu = (record.environment.get("gpu") or {}).get("name") or "CPU"
    click.echo(
        f"{record.model}, {record.quantization}, {record.rounding} rounding, {len(record.pairs)} pictures on {gpu}\n"
    )
    Console(width=100, highlight=False).print(table)
    if shortfall is not None:
        click.echo(f"\nNot within: {shortfall}.")
    else:
        click.echo(f"\nWithin SSIM {thresholds.ssim:g} and PSNR {thresholds.psnr:g} dB.")
    refused = record.why_not_within(type(thresholds)())  # apply knows the defaults alone
    click.echo("contract measured is allowed here." if refused is None else f"Not allowed here: {refused}.")
    for path in paths:
        click.echo(path)
