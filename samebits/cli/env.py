"""``samebits env``: what decides bits on this machine, and whether kernels can run here."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the fingerprint as JSON and nothing else.")
def env(as_json: bool) -> None:
    """Print the fingerprint: GPU, driver, torch, triton, libraries, and flags that change numerics."""
    from samebits import __version__
    from samebits.environment import digest, fingerprint

    found = fingerprint()
    known = {"samebits": __version__, "digest": digest(found), "kernels": _kernels(), **found}
    if as_json:
        click.echo(json.dumps(known, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in known.items():
        for label, text in _rows(name, value):
            table.add_row(label, text)
    Console(highlight=False, markup=False).print(table)


def _kernels() -> dict[str, str]:
    """Say whether kernels can run here: on the GPU, and with ``--host`` on the CPU."""
    import torch

    from samebits import jit

    gpu = "torch sees no NVIDIA GPU"
    if torch.cuda.is_available():
        gpu = jit.unavailable(torch.device("cuda", torch.cuda.current_device())) or "ready"
    return {"gpu": gpu, "host": jit.unavailable(torch.device("cpu"), host=True) or "ready"}


def _rows(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        if not value:
            return [(name, "none set")]
        return [row for key, inner in value.items() for row in _rows(f"{name} {key}", inner)]
    if value is None or value == []:
        return [(name, "none")]
    if isinstance(value, list):
        return [(name, ", ".join(map(str, value)))]
    return [(name, {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value))]
