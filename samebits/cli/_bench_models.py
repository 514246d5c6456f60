"""``samebits bench models``: one forward of a whole denoiser, every way there is to run it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samebits.cli._bench import COMMIT, JSON, OUT, has_gpu, leave, on_cpu, on_gpu, report, say


@click.command("models")
@OUT
@click.option("--model", "names", multiple=True, help="Only this model: z-image or qwen-image. Default: both.")
@click.option("--size", "sizes", multiple=True, type=click.IntRange(1), help="Side in pixels, several times [1024].")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 64), help="Pictures at once [1].")
@click.option("--all", "everything", is_flag=True, help="Sizes 512, 1024, 1328, 2048 and batches 1, 2 where not given.")
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True, help="Turns of each variant.")
@click.option(
    "--variants", metavar="NAME,NAME...", help="Only these ways, for example eager,ours,ours_graph,floor_graph."
)
@click.option("--compile/--no-compile", "compiled", default=None, help="torch.compile too [with a GPU: yes].")
@click.option("--max-autotune", is_flag=True, help="torch.compile's max-autotune too; it compiles for minutes.")
@click.option("--emulate-precision-casts", is_flag=True, help="torch.compile with that option too.")
@click.option("--add", is_flag=True, help="Keep the rows of models.json that this run does not measure again.")
@COMMIT
@JSON
def models(
    out: Path | None,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    batches: tuple[int, ...],
    everything: bool,
    rounds: int,
    variants: str | None,
    compiled: bool | None,
    max_autotune: bool,
    emulate_precision_casts: bool,
    add: bool,
    commit: str | None,
    as_json: bool,
) -> None:
    """One forward every way: eager, torch.compile, ours, each with a CUDA graph too, and the floor: models.json."""
    cpu = not has_gpu()
    if cpu and (out is not None or add):
        raise click.UsageError("--out and --add store what a GPU measured, and torch sees none here.")
    measured, environment, folder = on_cpu() if cpu else on_gpu(out)
    from samebits.bench import forwards, models, ratios, targets
    from samebits.bench import variants as ways_to_run
    from samebits.errors import EvidenceError
    from samebits.ops import OPS

    unknown = [name for name in names if name not in models.BUILDERS]
    if unknown:
        raise click.UsageError(f"no model is called {unknown[0]!r}; there are {', '.join(models.BUILDERS)}")
    if everything:
        sizes, batches = sizes or forwards.SIZES, batches or forwards.BATCHES
    sizes = sizes or ((models.SMALL_SIZE,) if cpu else (ratios.HEADLINE_SIZE,))
    wrong = [size for size in sizes if size % models.SIZE_MULTIPLE]
    if wrong:
        raise click.UsageError(f"--size {wrong[0]}: expected a multiple of {models.SIZE_MULTIPLE} pixels")
    ways = {
        "compile": not cpu if compiled is None else compiled,
        "compile_max_autotune": max_autotune,
        "compile_emulate_precision_casts": emulate_precision_casts,
    }
    only = _only(variants, cpu)
    if only:
        if compiled is not None or max_autotune or emulate_precision_casts:
            raise click.UsageError("--variants says which ways of torch.compile run; leave its own options out.")
        ways = {way: way in only or f"{way}_graph" in only for way in ways}
    choice = ways_to_run.Choice(tuple(way for way, on in ways.items() if on), graphs=not cpu, rounds=rounds, only=only)
    command = " ".join(
        [
            "samebits bench models",
            *(f"--model {name}" for name in names),
            *(f"--size {size}" for size in sizes),
            *(f"--batch {batch}" for batch in batches),
            *([f"--rounds {rounds}"] if rounds != ways_to_run.ROUNDS else []),
            *([f"--variants {','.join(only)}"] if only else []),
            *(["--no-compile"] if compiled is False else []),
            *(["--max-autotune"] if max_autotune else []),
            *(["--emulate-precision-casts"] if emulate_precision_casts else []),
        ]
    )
    run = forwards.here(measured, OPS, choice, models.SMALL) if cpu else forwards.apart(measured.device, choice)
    try:
        outcome = forwards.record(
            None if cpu else folder,
            run,
            OPS,
            names or tuple(models.BUILDERS),
            sizes,
            batches or (1,),
            command=command,
            environment=environment,
            commit=commit,
            add=add,
            say=say,
        )
    except EvidenceError as error:  # the file that rows were to be added to
        raise click.UsageError(str(error)) from error
    wanted = ratios.targets(outcome.rows)
    written = forwards.MEANINGLESS if cpu else "nothing was measured, so nothing is written"
    if outcome.rows and not cpu:
        written = report(folder, "models", wanted, outcome.notes)
    if as_json:
        document = {
            "models": outcome.rows,
            "notes": outcome.notes,
            "targets": [target.__dict__ for target in wanted],
            "meaningful": not cpu,
        }
        click.echo(json.dumps(document, indent=2))
    else:
        told = [ratios.models_table(outcome.rows, outcome.notes), written]
        told += [targets.targets_table(wanted)] if wanted else []
        click.echo("\n" + "\n\n".join(told))
    leave(forwards.good(outcome))


def _only(variants: str | None, cpu: bool) -> tuple[str, ...]:
    """The variants that were asked for, or none where all are meant.

    Raises
    ------
    click.UsageError
        There is no such variant, or it needs a GPU and there is none.
    """
    if variants is None:
        return ()
    from samebits.bench import evidence

    known = (*evidence.VARIANTS, *evidence.EXTRA_VARIANTS)
    only = tuple(dict.fromkeys(name.strip() for name in variants.split(",")))
    unknown = [name for name in only if name not in known]
    if unknown:
        raise click.UsageError(f"--variants: there is no {unknown[0]!r}; there are {', '.join(known)}")
    graphs = [name for name in only if name.endswith("_graph")]
    if cpu and graphs:
        raise click.UsageError(f"--variants {graphs[0]}: a graph is captured on a GPU, and torch sees none here.")
    return only
