"""``samebits generate``: a picture from a diffusers pipeline, through the gate, with its report and its proof.

Everything that can be wrong with the input is looked at before a weight is loaded. A picture is written as soon as
there is one, so that nothing that fails later can lose it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from samebits import tiny
from samebits.cli import DIFFERENT, _output
from samebits.cli._input import PROMPT, Options, check_combinations, find_prompt, parse_size

if TYPE_CHECKING:
    from samebits.loading import Source
    from samebits.proof.pictures import Picture, Proof

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class Result:
    """What came out so far. ``to_json`` is the document of ``--json``."""

    source: Source
    device: str
    output: Path
    seconds: dict[str, float] = field(default_factory=dict)
    picture: Picture | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    rechecks: dict[str, Any] | None = None
    report: Any = None
    proof: Proof | None = None
    warnings: list[str] = field(default_factory=list)
    """What was done to the input, in sentences."""

    def to_json(self) -> dict[str, Any]:
        picture = self.picture
        return {
            "model": self.source.model,
            "device": self.device,
            "output": str(self.output),
            "warnings": self.warnings,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "sha256": {
                "image": picture.image_sha256 if picture else None,
                "latents": list(picture.latents_sha256) if picture else [],
            },
            "sites": self.rows,
            "cuda_graphs": self.graphs,
            "rechecks": self.rechecks,
            "notes": [] if self.report is None else list(self.report.notes),
            "proof": None if self.proof is None else self.proof.to_json(),
        }


@click.command()
@click.argument("model", default=tiny.NAMES[0])
@click.option("-p", "--prompt", help=f'What to paint. Needed, but for the embedded models ("{PROMPT}").')
@click.option(
    "--prompt-file", type=click.Path(path_type=Path), metavar="FILE", help="Read the prompt from FILE (UTF-8)."
)
@click.option("--negative-prompt", metavar="TEXT", help="What not to paint. Turns guidance on.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: the model's; embedded: 4].")
@click.option(
    "--size",
    metavar="WIDTHxHEIGHT",
    callback=parse_size,
    help="Pixels, width first [default: 1024x1024; embedded: 256x256].",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the initial noise.")
@click.option("--guidance", type=float, help="Classifier-free guidance [default: the pipeline's; a Turbo: 0].")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of the weights.")
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option(
    "--offload",
    type=click.Choice(["none", "model", "group"]),
    default="none",
    show_default=True,
    help="Keep weights in memory and bring them to the GPU by component or by layer.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="[default: MODEL-SEED.png]")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.option(
    "--prove", is_flag=True, help="Eager twice and fused once, compared after every step. Exit code 1: not equal."
)
@click.option("--eager", is_flag=True, help="Do not apply samebits: diffusers alone.")
@click.option("--host", is_flag=True, help="On the CPU, through kernels compiled for the CPU (needs a C++ compiler).")
@click.option("--strict", is_flag=True, help="Stop at any fault of ours instead of going on with eager's result.")
@click.option("--cuda-graphs", is_flag=True, help="Replay the denoiser from CUDA graphs.")
@click.option(
    "--recheck-every",
    type=click.IntRange(0, 10**9),
    metavar="N",
    help="Compare one verified call of a site in N with eager again [default: SAMEBITS_RECHECK_EVERY, else never].",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def generate(**values: Any) -> int:
    """Paint a picture with MODEL: a hub id, a local folder, or tiny-qwen-image (the default) or tiny-z-image."""
    options = Options(**values)
    prompt = find_prompt(options)
    check_combinations(options)
    output = options.output or Path(f"{Path(options.model).name or 'picture'}-{options.seed}.png")
    _output.check(output, options.force)

    from samebits.loading import find
    from samebits.settings import settings

    settings()
    source = find(options.model)
    width, height = options.size or (source.side, source.side)
    steps = options.steps or source.steps
    source.check_size(width, height)
    source.check_steps(steps)
    arguments = {
        "prompt": prompt,
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        **source.guidance(options.guidance, options.negative_prompt),
    }
    result = Result(source, "", output)
    _run(options, result, arguments)
    if options.as_json:
        click.echo(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        _show(options, result, arguments)
    return 0 if result.proof is None or result.proof.equal else DIFFERENT


def _run(options: Options, result: Result, arguments: dict[str, Any]) -> None:
    """Load, paint as often as asked for, and write the picture as soon as there is one."""
    from samebits.cli._screen import quiet

    progress = not options.as_json and sys.stderr is not None and sys.stderr.isatty()
    with quiet(progress):
        import torch

        from samebits.loading.device import find_device

        device = find_device("cpu" if options.host else options.device)
        result.device = str(device)
        from samebits.apply import apply
        from samebits.loading import load
        from samebits.loading.prompts import cut_off
        from samebits.proof.pictures import paint, prove

        start = time.perf_counter()

        def look(pipeline: Any) -> None:
            result.warnings = cut_off(pipeline, arguments)
            if not options.as_json:
                for warning in result.warnings:
                    click.echo(f"samebits: warning: {warning}", err=True)

        pipeline = load(result.source, getattr(torch, DTYPES[options.dtype]), device, options.offload, look)
        result.seconds["load"] = time.perf_counter() - start

        def run(name: str) -> Picture:
            pipeline.set_progress_bar_config(disable=not progress, desc=name.replace("_", " "), file=sys.stderr)
            picture = paint(pipeline, arguments, options.seed)
            result.seconds[name] = picture.seconds
            if result.picture is None:
                result.picture = picture
                result.output = _output.save(picture.image, result.output, options.force)
            return picture

        eager = [run(name) for name in ("eager", "eager_again")[: 2 if options.prove else int(options.eager)]]
        if options.eager:
            return
        handle = apply(
            pipeline,
            strict=options.strict,
            host=options.host,
            cuda_graphs=options.cuda_graphs,
            recheck_every=options.recheck_every,
        )
        try:
            fused = run("fused")
        finally:
            result.report = handle.report()
            result.rows = result.report.to_json()
            result.graphs = [row.to_json() for row in result.report.graphs]
            result.rechecks = result.report.rechecks.to_json()
            handle.remove()
        if options.prove:
            result.proof = prove(eager[0], eager[1], fused)
            if not result.proof.equal and not result.proof.void:
                _output.save(fused.image, _output.beside(result.output, "different"), False)


def _show(options: Options, result: Result, arguments: dict[str, Any]) -> None:
    from samebits.cli._screen import summary

    size = f"{arguments['width']}x{arguments['height']}"
    asked = f"{options.dtype}, {size}, {arguments['num_inference_steps']} steps, seed {options.seed}"
    click.echo(f"{result.source.model} on {result.device} ({asked})\n")
    if result.report is not None:
        click.echo(f"{result.report}\n")
        click.echo(summary(result.report.rows))
    if result.proof is not None:
        click.echo(f"{result.proof}{_reservation(options, result) if result.proof.equal else ''}")
        if result.proof.first_difference is not None and not result.proof.void:
            click.echo(f"Eager's picture is in {result.output}, the other one beside it.")
    times = ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in result.seconds.items())
    click.echo(f"{result.output}  ({times})")
    if result.picture is not None:
        click.echo(f"sha256 of the pixels {result.picture.image_sha256}")
        if not bool(result.picture.latents[-1].isfinite().all()):
            click.echo(
                "Note: the last latents hold NaN or infinity, in eager's own arithmetic too or not: see --prove."
            )


def _reservation(options: Options, result: Result) -> str:
    """Say what makes an equal proof worth less than it looks, or nothing."""
    if not any(row["fused"] for row in result.rows):
        return " But no site was fused: eager was compared with eager."
    if options.host:
        return " With --host they must: every call is compared there, and eager's own tensors go on."
    return ""
