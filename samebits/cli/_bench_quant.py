"""``samebits bench quant``: one forward of a whole denoiser in FP8, fused and unfused, against bf16."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samebits.cli._bench import COMMIT, JSON, OUT, has_gpu, leave, on_cpu, on_gpu, report, say

MODEL = "qwen-image"


@click.command("quant")
@OUT
@click.option("--size", type=click.IntRange(1), help="Side in pixels [1024].")
@click.option("--batch", type=click.IntRange(1, 64), default=1, show_default=True, help="Pictures at once.")
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Turns of each variant.")
@COMMIT
@JSON
def quant(out: Path | None, size: int | None, batch: int, rounds: int, commit: str | None, as_json: bool) -> None:
    """One forward of Qwen-Image in FP8: unfused, fused, biases absorbed, against ours in bf16: quant.json."""
    cpu = not has_gpu()
    if cpu and out is not None:
        raise click.UsageError("--out stores what a GPU measured, and torch sees none here.")
    from samebits.bench import models

    size = size or (models.SMALL_SIZE if cpu else 1024)
    if size % models.SIZE_MULTIPLE:
        raise click.UsageError(f"--size {size}: expected a multiple of {models.SIZE_MULTIPLE} pixels")
    measured, environment, folder = on_cpu() if cpu else on_gpu(out)
    from samebits.bench import forwards, quant_ratios, targets
    from samebits.bench import quant as run
    from samebits.ops import OPS

    options = [*([f"--batch {batch}"] if batch != 1 else []), *([f"--rounds {rounds}"] if rounds != run.ROUNDS else [])]
    builder = (models.SMALL if cpu else models.BUILDERS)[MODEL]
    outcome = forwards.record(
        None if cpu else folder,
        run.here(measured, OPS, builder, not cpu, rounds),
        OPS,
        (MODEL,),
        (size,),
        (batch,),
        command=" ".join(["samebits bench quant", f"--size {size}", *options]),
        environment=environment,
        commit=commit,
        kind="quant",
        say=say,
    )
    wanted = [] if cpu else quant_ratios.targets(outcome.rows)
    written = forwards.MEANINGLESS if cpu else "nothing was measured"
    if outcome.rows and not cpu:
        written = report(folder, "quant", wanted, outcome.notes)
    if as_json:
        document = {
            "quant": outcome.rows,
            "notes": outcome.notes,
            "targets": [target.__dict__ for target in wanted],
            "meaningful": not cpu,
        }
        click.echo(json.dumps(document, indent=2))
    else:
        told = [quant_ratios.quant_table(outcome.rows, outcome.notes), written]
        told += [targets.targets_table(wanted)] if wanted else []
        click.echo("\n" + "\n\n".join(told))
    leave(run.good(outcome))
