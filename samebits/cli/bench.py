"""``samebits bench``: measure ops, whole denoisers and whole pictures on this machine's GPU and write the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from samebits.cli._bench import COMMIT, JSON, OUT, leave, on_gpu, report
from samebits.cli._bench_models import models
from samebits.cli._bench_pipeline import pipeline
from samebits.cli._bench_quant import quant


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure on an NVIDIA GPU: bits first, and a time of ours only where they are equal.

    Exit code 0: all bits equal. 1: some differ, or a case failed. 2: usage, or no GPU. Without a GPU, models
    and quant run tiny models, pipeline takes what has weights of its own, and all say that the figures mean nothing.
    """


bench.add_command(models)
bench.add_command(pipeline)
bench.add_command(quant)


@bench.command()
@OUT
@click.option("--op", "names", multiple=True, help="Only this op; can be given several times.")
@click.option("--sweeps/--no-sweeps", default=True, help="Millions of rows over amplitudes from 0.005 to 200.")
@click.option("--jobs", type=click.IntRange(0), help="Processes that compile ahead; 0 compiles as it goes.")
@COMMIT
@JSON
def ops(
    out: Path | None, names: tuple[str, ...], sweeps: bool, jobs: int | None, commit: str | None, as_json: bool
) -> None:
    """Every case of every op against eager: ops.json and host.json, and ops as a Markdown table and a chart."""
    measured, environment, folder = on_gpu(out)
    from samebits.bench import ops as run
    from samebits.bench import targets, warm
    from samebits.ops import OPS, by_name

    try:
        chosen = [by_name(name) for name in names] or list(OPS)
    except KeyError as error:
        raise click.UsageError(str(error.args[0])) from error
    jobs = warm.default_jobs() if jobs is None else jobs
    if jobs:
        failed = warm.warm(chosen, jobs)
        for told in failed[:5]:
            click.echo(f"could not be prepared: {told}", err=True)
        if len(failed) > 5:
            click.echo(f"... and {len(failed) - 5} more", err=True)
    command = " ".join(
        ["samebits bench ops", *(f"--op {name}" for name in names), *([] if sweeps else ["--no-sweeps"])]
    )
    rows, host = run.record(
        folder, measured, chosen, command=command, environment=environment, commit=commit, sweeps=sweeps
    )
    wanted = []
    if "layer_norm_modulate" in [op.name for op in chosen]:
        wanted += targets.modulate_targets(rows)
    if "qk_norm" in [op.name for op in chosen] and sweeps:
        wanted += targets.qk_targets(rows)
    wanted += targets.share_targets(rows) + targets.host_targets(host)
    written = report(folder, "ops", wanted)
    if as_json:
        click.echo(json.dumps({"ops": rows, "host": host}, indent=2))
    else:
        click.echo(f"\n{targets.ops_table(row for row in rows if _belongs_on_screen(row))}")
        click.echo(f"\n{_summary(rows)}\n\n{targets.targets_table(wanted)}\n\n{written}")
    leave(all(row["bits_equal"] and not row.get("error") for row in (*rows, *host)))


@bench.command()
@OUT
@click.option("--model", "names", multiple=True, help="Only this model: z-image or qwen-image. Default: both.")
@COMMIT
@JSON
def denoisers(out: Path | None, names: tuple[str, ...], commit: str | None, as_json: bool) -> None:
    """Whole denoisers at real size with random weights: denoisers.json."""
    measured, environment, folder = on_gpu(out)
    from samebits.bench import denoisers as run
    from samebits.bench import evidence, models, targets
    from samebits.ops import OPS

    unknown = [name for name in names if name not in models.BUILDERS]
    if unknown:
        raise click.UsageError(f"no model is called {unknown[0]!r}; there are {', '.join(models.BUILDERS)}")
    command = " ".join(["samebits bench denoisers", *(f"--model {name}" for name in names)])
    rows = run.record(
        folder, measured, OPS, names or tuple(models.BUILDERS), command=command, environment=environment, commit=commit
    )
    if as_json:
        click.echo(json.dumps({"denoisers": rows}, indent=2))
    else:
        click.echo(f"\n{targets.denoisers_table(rows)}\n\n{targets.targets_table(targets.denoiser_targets(rows))}")
        click.echo(f"\nwritten: {folder}")
    leave(all(evidence.DENOISERS.bits_equal(row) and not row.get("error") for row in rows))


def _belongs_on_screen(row: dict[str, Any]) -> bool:
    """Timed rows, sweeps, and everything that is not right; the rest is counted in the summary."""
    return row["us_fused"] is not None or "amplitudes" in row["case"] or not row["bits_equal"] or "error" in row


def _summary(rows: list[dict[str, Any]]) -> str:
    equal = [row for row in rows if row["bits_equal"]]
    compared = sum(row["rows_compared"] for row in rows)
    return f"bits equal in {len(equal)} of {len(rows)} cases and sweeps, {compared:,} rows compared"
