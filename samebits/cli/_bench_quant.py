"""``samebits bench quant``: one forward of a whole denoiser in FP8, fused and unfused, against bf16."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samebits.cli._bench import COMMIT, JSON, OUT, has_gpu, leave, on_cpu, on_gpu, report, say


@click.command("quant")
@click.argument("model", default="qwen-image")
@OUT
@click.option("--size", type=click.IntRange(1), help="Side in pixels [1024].")
@click.option("--batch", type=click.IntRange(1, 64), default=1, show_default=True, help="Pictures at once.")
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Turns of each variant.")
@click.option("--add", is_flag=True, help="Keep the rows of quant.json that this run does not measure again.")
@COMMIT
@JSON
def quant(
    model: str,
    out: Path | None,
    size: int | None,
    batch: int,
    rounds: int,
    add: bool,
    commit: str | None,
    as_json: bool,
) -> None:
    """One forward of MODEL in FP8: unfused, fused, biases absorbed, against ours in bf16: quant.json.

    MODEL is qwen-image (the default) or z-image, which absorbs no biases.
    """
    cpu = not has_gpu()
    if cpu and (out is not None or add):
        raise click.UsageError("--out and --add store what a GPU measured, and torch sees none here.")
    from samebits.bench import models

    if model not in models.BUILDERS:
        raise click.UsageError(f"no model is called {model!r}; there are {', '.join(models.BUILDERS)}")
    size = size or (models.SMALL_SIZE if cpu else 1024)
    if size % models.SIZE_MULTIPLE:
        raise click.UsageError(f"--size {size}: expected a multiple of {models.SIZE_MULTIPLE} pixels")
    measured, environment, folder = on_cpu() if cpu else on_gpu(out)
    from samebits.bench import evidence, forwards, quant_ratios, targets
    from samebits.bench import quant as run
    from samebits.errors import EvidenceError
    from samebits.ops import OPS

    parts = [
        "samebits bench quant",
        *([model] if model != "qwen-image" else []),
        f"--size {size}",
        *([f"--batch {batch}"] if batch != 1 else []),
        *([f"--rounds {rounds}"] if rounds != run.ROUNDS else []),
    ]
    builder = (models.SMALL if cpu else models.BUILDERS)[model]
    try:
        outcome = forwards.record(
            None if cpu else folder,
            run.here(measured, OPS, builder, not cpu, rounds),
            OPS,
            (model,),
            (size,),
            (batch,),
            command=" ".join(parts),
            environment=environment,
            commit=commit,
            kind="quant",
            add=add,
            say=say,
        )
    except EvidenceError as error:  # the file that rows were to be added to
        raise click.UsageError(str(error)) from error
    wanted = [] if cpu else quant_ratios.targets(outcome.rows)
    written = forwards.MEANINGLESS if cpu else "nothing was measured"
    if outcome.rows and not cpu:
        if add:  # the page is about every row of the record
            wanted = quant_ratios.targets(evidence.read(folder / "quant.json").rows)
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
