"""``samebits warm``: verify every signature of a deployment ahead of time, on the model that will serve."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from samebits.cli import DIFFERENT
from samebits.cli._input import parse_size
from samebits.cli.generate import DTYPES

if TYPE_CHECKING:
    from samebits.warming import Call, Warmth

_MOST_TOKENS = 1 << 20


def parse_sizes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, int]]:
    """Read ``1024,1328x768``: sides of squares, or ``WIDTHxHEIGHT``; a callback of click."""
    sizes = []
    for word in _words(values):
        size = parse_size(context, parameter, f"{word}x{word}" if word.isdigit() else word)
        if size is not None:
            sizes.append(size)
    return sizes


def parse_numbers(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[int]:
    """Read ``1,2,8-64:8``: numbers, ranges with both ends, ranges with a step; a callback of click."""
    numbers: list[int] = []
    for word in _words(values):
        found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?", word)
        first, last, step = (int(part) for part in found.groups("0")) if found else (0, 0, 0)
        if found and found[2] is None:
            last = first
        if found and found[3] is None:
            step = 1
        if not 1 <= first <= last <= _MOST_TOKENS or step < 1:
            raise click.BadParameter(f"expected numbers from 1 up such as 1,2 or 32-512:32, got {word!r}.")
        numbers.extend(range(first, last + 1, step))
    return numbers


def _words(values: tuple[str, ...]) -> Iterator[str]:
    for value in values:
        for word in value.split(","):
            yield word.strip()


@click.command()
@click.argument("model")
@click.option(
    "--sizes",
    "--size",
    multiple=True,
    callback=parse_sizes,
    metavar="PIXELS,...",
    help="Sides of squares or WIDTHxHEIGHT [default: 1024; embedded: 256].",
)
@click.option("--batch", multiple=True, callback=parse_numbers, metavar="N,...", help="Prompts at once [1].")
@click.option(
    "--tokens",
    multiple=True,
    callback=parse_numbers,
    metavar="N,...",
    help="Text lengths, such as 32,64 or 5-512 or 32-512:32 [default: every one up to 512 that has shapes of its own].",
)
@click.option("--steps", type=click.IntRange(1, 1000), default=1, show_default=True, help="Denoising steps of a run.")
@click.option("--guidance", type=float, help="Classifier-free guidance [default: the pipeline's; a Turbo: 0].")
@click.option("--negative-prompt", metavar="TEXT", help="The one that will be served. Turns guidance on.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True, help="Of the weights.")
@click.option("--device", help="cpu, cuda or cuda:N [default: cuda where there is one].")
@click.option(
    "--offload",
    type=click.Choice(["none", "model", "group"]),
    default="none",
    show_default=True,
    help="As it will be served.",
)
@click.option("--host", is_flag=True, help="On the CPU, through kernels compiled for the CPU (needs a C++ compiler).")
@click.option("--trust", is_flag=True, help="Believe stored verdicts; without it everything is compared anew.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def warm(
    model: str,
    sizes: list[tuple[int, int]],
    batch: list[int],
    tokens: list[int],
    steps: int,
    guidance: float | None,
    negative_prompt: str | None,
    dtype: str,
    device: str | None,
    offload: str,
    host: bool,
    trust: bool,
    as_json: bool,
) -> int:
    """Verify all signatures of a deployment of MODEL: every size, batch and text length together.

    MODEL is a hub id, a local folder, tiny-qwen-image or tiny-z-image. Verdicts are stored as a certificate of this
    environment, and the compiled kernels in the cache, so that a server that comes after and trusts what is stored
    compares and compiles nothing. See docs/certificates.md.

    Exit code 0: everything was verified. 1: something was refused, failed or left open, or there was nothing that a
    kernel takes. 2: usage.
    """
    if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
        raise click.BadParameter(f"expected a number from 0 up, got {guidance}.", param_hint="--guidance")
    if host and device is not None and not device.startswith("cpu"):
        raise click.UsageError(f"--host runs on the CPU and --device {device} does not. Leave one out.")
    from samebits.loading import find
    from samebits.settings import settings

    if settings().disabled:
        raise click.UsageError("SAMEBITS_DISABLE is set, so no kernel may run. Unset it first.")
    source = find(model)
    sizes = sizes or [(source.side, source.side)]
    for width, height in sizes:
        source.check_size(width, height)
    arguments = source.guidance(guidance, negative_prompt)

    from samebits.cli._screen import quiet

    progress = not as_json and sys.stderr is not None and sys.stderr.isatty()
    with quiet(progress):
        import torch

        from samebits.apply import apply
        from samebits.certificate import CertificateStore, folder_in, name_of
        from samebits.environment import certified
        from samebits.gate import Gate
        from samebits.loading import load
        from samebits.loading.device import find_device
        from samebits.warming import Texts, Warmth
        from samebits.warming import warm as run

        where = find_device("cpu" if host else device)
        pipeline: Any = load(source, getattr(torch, DTYPES[dtype]), where, offload)
        pipeline.set_progress_bar_config(disable=True)
        most = Texts(pipeline).most
        if tokens and max(tokens) > most:
            raise click.UsageError(f"--tokens {max(tokens)}: {model} takes texts of at most {most} tokens.")
        store = CertificateStore(folder_in(settings().cache_dir), certified)
        gate = Gate()
        gate.use(store, "stored" if trust else "anew")
        outcome = Warmth()
        handle = apply(pipeline, host=host, gate=gate)
        try:
            with _bar(progress) as watch:
                run(
                    pipeline,
                    handle,
                    sizes=sizes,
                    batches=batch or (1,),
                    tokens=tokens or None,
                    steps=steps,
                    arguments=arguments,
                    watch=watch,
                    outcome=outcome,
                )
        finally:
            report = handle.report()
            handle.remove()
            gate.flush()  # What was verified is kept, also where this was interrupted.
    kept = {"name": name_of(certified()), "verdicts": len(store.verdicts()), "problem": store.problem}
    if as_json:
        document = {
            "model": model,
            "device": str(where),
            **to_json(outcome),
            "certificate": kept,
            "sites": report.to_json(),
        }
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        click.echo(f"{model} on {where}, {dtype}\n")
        show(outcome)
        silent = unasked(report.to_json())
        if silent is not None:
            click.echo(silent)
        click.echo(_kept(kept, host))
    return 0 if outcome.good else DIFFERENT


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[Call, int, int], None]]:
    """A bar with the time that is left; without a terminal nothing is drawn."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as progress:
        task = progress.add_task("warming", total=None)

        def watch(call: Call, number: int, count: int) -> None:
            progress.update(task, description=str(call), completed=number - 1, total=count)

        yield watch


def reasons(outcome: Warmth) -> list[dict[str, Any]]:
    """Why signatures are not verified: each sentence once, the commonest first, with one signature as an example."""
    from samebits.gate import State

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for verdict in outcome.verdicts:
        if verdict.state is not State.VERIFIED:
            row = found.setdefault(
                (verdict.state.value, verdict.cause),
                {
                    "state": verdict.state.value,
                    "cause": verdict.cause,
                    "signatures": 0,
                    "ops": {},
                    "example": {"op": verdict.op, "signature": verdict.signature},
                },
            )
            row["signatures"] += 1
            row["ops"][verdict.op] = row["ops"].get(verdict.op, 0) + 1
    return sorted(found.values(), key=lambda row: -row["signatures"])


def to_json(outcome: Warmth) -> dict[str, Any]:
    """The outcome as a JSON-able dictionary."""
    from samebits.gate import State

    return {
        "good": outcome.good,
        "combinations": len(outcome.calls),
        "unsettled": [str(call) for call in outcome.unsettled],
        "runs": outcome.runs,
        "seconds": round(outcome.seconds, 3),
        "ops": [{"op": op, **{state.value: states[state] for state in State}} for op, states in outcome.by_op.items()],
        "reasons": reasons(outcome),
    }


def show(outcome: Warmth) -> None:
    """Print the table of signatures, and why some are not verified."""
    from rich.console import Console
    from rich.table import Table

    from samebits.gate import State

    console = Console(highlight=False, markup=False)
    order = (State.VERIFIED, State.REFUSED, State.FAILED, State.UNSUPPORTED, State.UNKNOWN)
    table = Table("op", *(state.value for state in order), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for op, states in outcome.by_op.items():
        table.add_row(op, *(f"{states[state]:,}" for state in order))
    table.add_row("all", *(f"{outcome.count(state):,}" for state in order))
    console.print(table)
    shown: Counter[tuple[str, ...]] = Counter()
    for row in reasons(outcome):
        # A mismatch names its own element, so there may be as many sentences as signatures: one for each op will do.
        group = (row["state"], *row["ops"])
        shown[group] += 1
        if shown[group] == 1:
            ops = ", ".join(row["ops"])
            click.echo(f"\n{row['signatures']:,} {row['state']} ({ops}): {row['cause']}")
            click.echo(f"  such as {row['example']['op']}({row['example']['signature']})")
    hidden = sum(number - 1 for number in shown.values())
    if hidden:
        click.echo(f"\n... and {hidden:,} more sentences of these kinds; --json has all of them")
    for call in outcome.unsettled:
        click.echo(f"\n{call}: still met something new after several runs")
    for op in outcome.full:
        click.echo(f"\n{op}: more signatures than the gate remembers; warm fewer combinations per process")
    number = len(outcome.calls)
    click.echo(f"\n{number:,} combination{'s' * (number != 1)}, {outcome.runs:,} runs, {outcome.seconds:.1f} s")


def _kept(kept: dict[str, Any], host: bool) -> str:
    """Say what the next process will find."""
    if kept["problem"]:
        return str(kept["problem"])
    if host:
        return "no verdict was stored: one of a kernel built for the CPU is worth its own run only"
    if not kept["verdicts"]:
        return "no verdict was stored: nothing was compared"
    return f"certificate {kept['name']} holds {kept['verdicts']:,} verdicts about this environment"


def unasked(rows: list[dict[str, Any]]) -> str | None:
    """Say which sites no run reached, or return ``None``: nothing is known about their signatures."""
    silent = [row for row in rows if not row["fused"] and not row["eager"]]
    if not silent:
        return None
    (why, _), *others = Counter(reason for row in silent for reason in row["reasons"]).most_common()
    more = f" (and {len(others)} more reasons)" if others else ""
    return f"{len(silent):,} of {len(rows):,} sites made no call of their own: {why}{more}"
