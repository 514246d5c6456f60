"""Evidence: what a run on a real GPU measured, in files that the tool writes and nobody edits.

Every file is ``{"command", "environment", "source", "rows"}``. ``source`` holds a hash per op, so a kernel that
changed voids its own claims until it is run again. A row whose bits differ carries no speed: validation refuses
it, on writing and on reading.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from samebits.errors import EvidenceError
from samebits.files import write_whole

Row = dict[str, Any]
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Schema:
    """What the rows of one kind of file must hold. Further columns are allowed, these are required."""

    kind: str
    text: tuple[str, ...]
    speeds: tuple[str, ...]
    """Positive numbers, or null where nothing was timed. Always null in a row whose bits differ."""
    counts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    fractions: tuple[str, ...] = ()
    """Texts ``n/m``: n of m equal."""
    amounts: tuple[str, ...] = ()
    """Parts of a time: numbers that are not negative, or null. Null too in a row whose bits differ."""
    differences: tuple[str, ...] = ()
    """One time less another: finite numbers, or null. Null too in a row whose bits differ."""
    variants: tuple[str, ...] = ()
    """What the column ``variant`` may say, where there is one."""
    claims: tuple[str, ...] | None = None
    """The variants whose rows claim eager's bits; ``None``: every row does. A row that claims nothing (a peer such as
    torch.compile, or a floor that computes no output) says ``false`` and keeps its time."""
    closed: bool = False
    """Whether a row has these columns, perhaps those of ``figures``, and no others."""
    figures: tuple[str, ...] = ()
    """What only some rows say, and what is no time: finite numbers, or null."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every required column."""
        times = (*self.speeds, *self.amounts, *self.differences)
        return (*self.text, *self.counts, *self.flags, *self.fractions, *times)

    def bits_equal(self, row: Mapping[str, Any]) -> bool:
        """Whether everything that this row compared was equal."""
        return all(row[flag] is True for flag in self.flags) and all(
            row[name].split("/")[0] == row[name].split("/")[1] for name in self.fractions
        )

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """A sentence that says what is wrong with the row, or ``None``."""
        missing = [name for name in self.columns if name not in row]
        if missing:
            return f"column {missing[0]!r} is missing"
        further = [name for name in row if name not in self.columns and name not in self.figures]
        if self.closed and further:
            return f"column {further[0]!r} is not one of {', '.join(self.columns)}"
        if self.variants and row["variant"] not in self.variants:
            return f"column 'variant' must be one of {', '.join(self.variants)}, got {row['variant']!r}"
        checks: Sequence[tuple[tuple[str, ...], Callable[[Any], bool], str]] = (
            (self.text, lambda v: isinstance(v, str) and v != "", "a text that is not empty"),
            (self.speeds, lambda v: v is None or _is_positive(v), "a positive finite number or null"),
            (self.amounts, lambda v: v is None or _is_amount(v), "a number that is not negative, or null"),
            (self.differences, lambda v: v is None or _is_finite(v), "a finite number or null"),
            (self.counts, lambda v: type(v) is int and v >= 0, "an integer that is not negative"),
            (self.flags, lambda v: type(v) is bool, "true or false"),
            (self.fractions, lambda v: isinstance(v, str) and re.fullmatch(r"\d+/[1-9]\d*", v) is not None, "n/m"),
        )
        for names, fits, wanted in checks:
            for name in names:
                if not fits(row[name]):
                    return f"column {name!r} must be {wanted}, got {row[name]!r}"
        for name in self.figures:
            value = row.get(name)
            if value is not None and not _is_finite(value):
                return f"column {name!r} must be a finite number or null, got {value!r}"
        if not self.bits_equal(row) and (self.claims is None or row["variant"] in self.claims):
            told = [name for name in row if _tells_speed(name) and row[name] is not None]
            if told:
                return f"bits differ, so {told[0]!r} must be null, got {row[told[0]]!r}"
        return None


OPS = Schema(
    "ops",
    text=("op", "case", "dtype"),
    speeds=("us_eager", "us_fused", "copy_share"),
    counts=("rows_compared",),
    flags=("bits_equal",),
)
HOST = Schema(
    "host",
    text=("op", "case", "dtype"),
    speeds=("us_host_launch", "us_host_call", "us_host_site"),
    flags=("bits_equal",),
)
DENOISERS = Schema(
    "denoisers",
    text=("model",),
    speeds=("ms_eager", "ms_ours"),
    counts=("launches_eager", "launches_ours"),
    flags=("output_equal",),
    fractions=("blocks_equal", "steps_equal"),
)
VARIANTS = ("eager", "eager_graph", "compile", "compile_graph", "ours", "ours_graph", "floor_graph")
"""The ways to run one forward that a plain run of ``samebits bench models`` compares."""
EXTRA_VARIANTS = ("compile_max_autotune", "compile_emulate_precision_casts")
"""Those that must be asked for: each compiles for minutes."""
MODELS = Schema(
    "models",
    text=("model", "variant"),
    speeds=("ms",),
    counts=("size", "batch", "launches"),
    flags=("bits_equal",),
    amounts=("ms_gemm", "ms_attention", "ms_other"),
    variants=(*VARIANTS, *EXTRA_VARIANTS),
    claims=("ours", "ours_graph"),
    closed=True,
)
PICTURES = ("eager_first", "eager", "ours_first_cold", "ours_first", "ours")
"""The pictures of ``samebits bench pipeline``: the first one holds what happens once, cold also every compilation."""
PIPELINE = Schema(
    "pipeline",
    text=("model", "mode", "variant"),
    speeds=("s",),
    counts=("size", "steps", "calls", "fused", "eager", "replayed"),
    flags=("bits_equal",),
    amounts=("s_text_encoder", "s_denoiser", "s_vae", "s_rest"),
    differences=("s_more",),
    variants=PICTURES,
    claims=("ours_first_cold", "ours_first", "ours"),
    closed=True,
)
QUANT_VARIANTS = ("bf16_exact_graph", "fp8_unfused", "fp8_fused", "fp8_fused_graph", "fp8_absorbed_graph")
"""The ways to run one forward that ``samebits bench quant`` compares."""
QUANT = Schema(
    "quant",
    text=("model", "variant"),
    speeds=("ms",),
    counts=("size", "batch", "launches", "launches_gemm", "launches_attention", "launches_other"),
    flags=("bits_equal",),
    amounts=("ms_gemm", "ms_attention", "ms_other"),
    variants=QUANT_VARIANTS,
    # A bias that is added later moves bits by design: its variant claims none.
    claims=("bf16_exact_graph", "fp8_fused", "fp8_fused_graph"),
    closed=True,
    figures=("biases_absorbed", "output_relative_error", "output_psnr_db", "latents_psnr_db", "latents_ssim"),
)
SCHEMAS = {schema.kind: schema for schema in (OPS, HOST, DENOISERS, MODELS, PIPELINE, QUANT)}


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_finite(value) and value > 0


def _is_amount(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def _tells_speed(column: str) -> bool:
    return column.startswith(("us_", "ms_", "s_")) or column in {"ms", "s", "copy_share", "speedup"}


def without_speeds(row: Row) -> Row:
    """The row with every column that tells a speed set to ``None``."""
    return {name: None if _tells_speed(name) else value for name, value in row.items()}


@dataclass(frozen=True)
class Record:
    """One evidence file."""

    kind: str
    command: str
    environment: Mapping[str, Any]
    source: Mapping[str, Any]
    rows: Sequence[Row]

    def check(self) -> None:
        """Raise :class:`EvidenceError` for the first row that does not fit the schema of this kind."""
        schema = SCHEMAS[self.kind]
        for number, row in enumerate(self.rows):
            problem = schema.problem(row)
            if problem is not None:
                raise EvidenceError(kind=self.kind, where=f"row {number}", problem=problem)

    def write(self, folder: Path) -> Path:
        """Validate, then put ``<kind>.json`` into ``folder`` in one step; an older file stays whole until then."""
        self.check()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.kind}.json"
        head = {"command": self.command, "environment": self.environment, "source": self.source}
        text = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}")
        # One row a line: a file that people compare line by line.
        rows = ",\n".join("    " + json.dumps(row, allow_nan=False) for row in self.rows)
        text += ',\n  "rows": [\n' + rows + "\n  ]\n}\n" if rows else ',\n  "rows": []\n}\n'
        write_whole(path, text.encode(), mode=0o644)  # evidence is for everybody
        return path


def read(path: Path) -> Record:
    """Read and validate one evidence file; its name without ``.json`` is its kind.

    Raises
    ------
    EvidenceError
        Not JSON, not the four keys, or a row that does not fit.
    """
    kind = path.stem
    if kind not in SCHEMAS:
        raise EvidenceError(kind=kind, where=str(path), problem=f"unknown kind; known are {', '.join(SCHEMAS)}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(kind=kind, where=str(path), problem=f"not JSON: {error}") from error
    wanted = {"command": str, "environment": dict, "source": dict, "rows": list}
    if not isinstance(data, dict) or set(data) != set(wanted):
        raise EvidenceError(kind=kind, where=str(path), problem=f"the keys must be exactly {', '.join(wanted)}")
    for key, kind_of_value in wanted.items():
        if not isinstance(data[key], kind_of_value):
            raise EvidenceError(kind=kind, where=str(path), problem=f"{key!r} must be a {kind_of_value.__name__}")
    if not all(isinstance(row, dict) for row in data["rows"]):
        raise EvidenceError(kind=kind, where=str(path), problem="every row must be an object")
    record = Record(kind, data["command"], data["environment"], data["source"], data["rows"])
    record.check()
    return record


def earlier(path: Path, source: Mapping[str, Any], environment: Mapping[str, Any]) -> Record:
    """The record that is there already, to which rows of the present run are to be added.

    Raises
    ------
    EvidenceError
        It is no record, or was measured with another source, on another GPU, or with another torch.
    """
    there = read(path)
    for what, then, now in (
        ("source", there.source.get("package"), source["package"]),
        ("GPU", _gpu(there.environment), _gpu(environment)),
        ("torch", there.environment.get("torch"), environment.get("torch")),
    ):
        if then != now:
            problem = f"its rows were measured with another {what}, so no row can be added; run everything anew"
            raise EvidenceError(kind=there.kind, where=str(path), problem=problem)
    return there


def _gpu(environment: Mapping[str, Any]) -> Any:
    return (environment.get("gpu") or {}).get("name")


def stale(record: Record, ops: Iterable[Any]) -> list[str]:
    """Names of the ops whose source is no longer the one this record was measured with."""
    measured = record.source.get("ops", {})
    return [op.name for op in ops if measured.get(op.name) != op.source_hash]


def source_of(ops: Iterable[Any], commit: str | None = None) -> dict[str, Any]:
    """What the figures were measured on: commit, whether files differ from it, hashes of package and ops.

    Parameters
    ----------
    ops : iterable of Op
    commit : str, optional
        For a copy of the checkout that has no git history: the commit it was copied from. ``dirty`` is then
        unknown (null) and ``package`` is what identifies the source.
    """
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", "samebits")
    return {
        "commit": head or commit or "unknown",
        "dirty": None if head is None or changes is None else changes != "",
        "package": package_hash(),
        "ops": {op.name: op.source_hash for op in ops},
    }


def package_hash(root: Path = PACKAGE) -> str:
    """SHA-256 over every source file of the package, shortened to 16 hexadecimal digits."""
    digest = sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp"}:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """Output of a git command about the checkout that holds the package; ``None`` where there is none."""
    # --show-prefix is empty only at the top of a checkout: an installed package inside somebody else's
    # repository must not report that repository's commit.
    folder = PACKAGE.parent
    prefix = _run_git(folder, "rev-parse", "--show-prefix")
    return _run_git(folder, *arguments) if prefix == "" else None


def _run_git(folder: Path, *arguments: str) -> str | None:
    # A copied checkout can belong to another user, which git refuses to read unless it is told otherwise.
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def folder_name(gpu: str) -> str:
    """``"NVIDIA H200"`` -> ``"h200"``: lower case, without the maker, words joined by hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-").removeprefix("nvidia-")
    if not name:
        raise ValueError(f"no folder name can be made from the GPU's name {gpu!r}")
    return name


def command_line(arguments: Sequence[str]) -> str:
    """The command as a person would type it again."""
    return shlex.join(arguments)
