"""``samebits certificates``: what is stored about which environment, and how to be rid of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from samebits.certificate import Certificate

HERE = "here"
"""What this environment's certificate may be called."""
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def certificates() -> None:
    """List, show and clear stored verdicts. See docs/certificates.md.

    A certificate has a name that begins with v1-; its first characters will do, and "here" is this environment's.
    """


@certificates.command("list")
@_JSON
def list_(as_json: bool) -> None:
    """List the certificates, the one that was used last first."""
    folder, here = _folder(), _here()
    with _explained(folder):
        found = _inspect(folder)
    rows = [_row(certificate, here) for certificate in found]
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "here": here, "certificates": rows}, indent=2))
        return
    if not rows:
        click.echo(f"no certificates in {folder}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "", "GPU", "torch", "verified", "refused", "newest", box=None, pad_edge=False)
    for column in (*table.columns[:2], *table.columns[4:]):
        column.no_wrap = True
    for row in rows:
        if not row["problem"]:
            newest = (row["newest"] or "")[:10]
            counts = (f"{row['verified']:,}", f"{row['refused']:,}", newest)
            table.add_row(row["name"][:_SHORT], HERE if row["here"] else "", row["gpu"], row["torch"], *counts)
    if table.row_count:
        Console(highlight=False, markup=False).print(table)
    for row in rows:
        if row["problem"]:
            click.echo(f"{row['name'][:_SHORT]} is not used: it {row['problem']}")
    click.echo(f"{len(rows)} in {folder}")


@certificates.command()
@click.argument("name", default=HERE)
@click.option("--op", help="Only verdicts of this op.")
@click.option("--refused", is_flag=True, help="Only signatures whose bits differed.")
@click.option("--signatures", is_flag=True, help="Print every signature instead of the counts per op.")
@_JSON
def show(name: str, op: str | None, refused: bool, signatures: bool, as_json: bool) -> None:
    """Show a certificate: its environment, how that differs from this one, and its verdicts. Default: here."""
    folder, here = _folder(), _here()
    with _explained(folder):
        certificate = _find(_inspect(folder), name, here, folder)
    from samebits.certificate import differences
    from samebits.environment import certified

    wanted = [
        verdict
        for verdict in certificate.verdicts
        if (op is None or verdict.op == op) and (not refused or verdict.state == "refused")
    ]
    apart = [] if certificate.problem else list(differences(certificate.environment, certified()))
    if as_json:
        document = {
            **_row(certificate, here),
            "path": str(folder / f"{certificate.name}.json"),
            "differences": apart,
            "environment": certificate.environment,
            "verdicts": [_verdict(verdict) for verdict in wanted],
        }
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(f"{folder / certificate.name}.json, {certificate.size_bytes:,} bytes")
    if certificate.problem:
        click.echo(f"not used: it {certificate.problem}")
        return
    gpu, torch = _title(certificate)
    click.echo(f"{gpu}, torch {torch}")
    click.echo("this environment" if not apart else f"another environment than this one, in {len(apart)} places:")
    for line in apart[:_LINES]:
        click.echo(f"  {line}")
    if len(apart) > _LINES:
        click.echo(f"  ... and {len(apart) - _LINES} more; --json has all of both")
    click.echo("")
    if signatures:
        for verdict in wanted:
            cause = f": {verdict.cause}" if verdict.cause else ""
            basis = f" ({verdict.elements:,} elements, {verdict.basis})" if verdict.basis else ""
            click.echo(f"{verdict.when[:19]} {verdict.state} {verdict.op}{basis}{cause}\n  {verdict.signature}")
    else:
        _show_counts(wanted)


@certificates.command()
@click.argument("names", nargs=-1)
@click.option("--yes", is_flag=True, help="Clear all of them.")
@_JSON
def clear(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete the certificates that are named, or all of them with --yes. Signatures are verified anew after that."""
    if bool(names) == yes:
        raise click.UsageError("name what to clear, or say --yes to clear all certificates; not both.")
    folder = _folder()
    here = _here() if HERE in names else ""
    with _explained(folder):
        from samebits.certificate import remove

        found = _inspect(folder)
        chosen = found if yes else [_find(found, name, here, folder) for name in names]
        gone = remove(folder, list(dict.fromkeys(certificate.name for certificate in chosen)))
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "removed": gone}, indent=2))
        return
    for certificate in chosen:
        if certificate.name in gone:
            gpu, torch = _title(certificate)
            what = f"{len(certificate.verdicts):,} verdicts of {gpu}, torch {torch}"
            click.echo(f"removed {certificate.name}: {what if not certificate.problem else 'it was not used'}")
    if not gone:
        click.echo(f"nothing to remove in {folder}")


_LINES = 12
_SHORT = 15
"""Characters of a name that a table shows: enough to tell them apart, and to name one."""


def _folder() -> Path:
    from samebits.certificate import folder_in
    from samebits.settings import settings

    return folder_in(settings().cache_dir)


def _here() -> str:
    """The name of this environment's certificate, whether there is one or not."""
    from samebits.certificate import name_of
    from samebits.environment import certified

    return name_of(certified())


def _inspect(folder: Path) -> list[Certificate]:
    from samebits.certificate import inspect

    return inspect(folder)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what is wrong with the folder into one sentence."""
    from samebits.certificate import Unbelievable
    from samebits.errors import CertificateError

    try:
        yield
    except Unbelievable as error:
        raise CertificateError(path=str(folder), problem=f"the folder {error}") from None
    except OSError as error:
        raise CertificateError(path=str(folder), problem=str(error.strerror or error)) from None


def _find(found: list[Certificate], name: str, here: str, folder: Path) -> Certificate:
    """The one certificate that a name, its beginning, or "here" means."""
    if name == HERE:
        chosen = [certificate for certificate in found if certificate.name == here]
        if not chosen:
            raise click.UsageError(f"nothing is stored for this environment ({here}) in {folder}.")
    else:
        chosen = [one for one in found if one.name.startswith((name, f"v1-{name}"))] if name else []
        if len(chosen) != 1:
            many = f"{len(chosen)} certificates begin with" if chosen else "no certificate is called"
            raise click.UsageError(f"{many} {name!r} in {folder}; `samebits certificates list` names them.")
    return chosen[0]


def _title(certificate: Certificate) -> tuple[str, str]:
    """GPU and torch of a certificate. Its environment is whatever JSON some samebits wrote."""
    environment = certificate.environment
    if certificate.problem:
        return "", ""
    gpu, torch = environment.get("gpu"), environment.get("torch")
    name = str(gpu.get("name")) if isinstance(gpu, dict) else "no GPU"
    return name, str(torch.get("version")) if isinstance(torch, dict) else "unknown"


def _row(certificate: Certificate, here: str) -> dict[str, Any]:
    states = Counter(verdict.state for verdict in certificate.verdicts)
    gpu, torch = _title(certificate)
    return {
        "name": certificate.name,
        "here": certificate.name == here,
        "gpu": gpu or None,
        "torch": torch or None,
        "verified": states["verified"],
        "refused": states["refused"],
        "newest": certificate.verdicts[0].when if certificate.verdicts else None,
        "size_bytes": certificate.size_bytes,
        "problem": certificate.problem,
    }


def _verdict(verdict: Any) -> dict[str, Any]:
    names = ("op", "source", "signature", "state", "cause", "elements", "basis", "when")
    return {name: getattr(verdict, name) for name in names}


def _show_counts(verdicts: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "source", "verified", "refused", "elements compared", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    groups: dict[tuple[str, str], list[Any]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.op, verdict.source), []).append(verdict)
    for (op, source), group in groups.items():
        states = Counter(verdict.state for verdict in group)
        elements = sum(verdict.elements for verdict in group)
        table.add_row(op, source, f"{states['verified']:,}", f"{states['refused']:,}", f"{elements:,}")
    Console(highlight=False, markup=False).print(table)
