"""What the subcommands of ``samebits bench`` share: options, the device to measure on, the report, the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

OUT = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the records. Default: evidence/<name of the GPU> of this checkout.",
)
COMMIT = click.option("--commit", help="The commit this source was copied from, where there is no git history.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of tables.")


def say(text: str) -> None:
    click.echo(text, err=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def on_gpu(out: Path | None) -> tuple[Any, dict[str, Any], Path]:
    """The GPU to measure on, the fingerprint, and the folder for the records."""
    import torch

    from samebits.bench.comparing import Bench
    from samebits.environment import fingerprint

    if not has_gpu():
        raise click.UsageError("bench needs an NVIDIA GPU and torch sees none; nothing measured elsewhere would count.")
    device = torch.device("cuda", torch.cuda.current_device())
    return Bench.on(device, say), fingerprint(), folder_of(out)


def folder_of(out: Path | None) -> Path:
    """The folder for the records: what was asked for, else the one that is named after the current GPU."""
    import torch

    from samebits.bench import evidence

    if out is not None:
        return out
    name = evidence.folder_name(torch.cuda.get_device_name(torch.cuda.current_device()))
    return evidence.PACKAGE.parent / "evidence" / name


def on_cpu() -> tuple[Any, dict[str, Any], Path]:
    """What runs the tiny models where there is no GPU; nothing is written, so the folder is never used."""
    import torch

    from samebits.bench.comparing import Bench
    from samebits.bench.timing import WallStopwatch
    from samebits.environment import fingerprint

    return Bench(torch.device("cpu"), WallStopwatch(), 1 << 20, say), fingerprint(), Path()


def report(folder: Path, kind: str, wanted: list[Any], notes: list[str] | tuple[str, ...] = ()) -> str:
    """Write the Markdown table and the chart of a record beside it; a sentence that says what lies where."""
    from samebits.bench import evidence, reports

    written, missing = reports.write(evidence.read(folder / f"{kind}.json"), folder, wanted, notes)
    names = ", ".join([f"{kind}.json", *(path.name for path in written)])
    return f"written: {names} in {folder}" + (f"; {missing}" if missing else "")


def leave(good: bool) -> None:
    """End the command: 0 where all is well, else 1."""
    click.get_current_context().exit(0 if good else 1)
