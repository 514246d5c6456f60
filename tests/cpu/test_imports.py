"""The house's arrows: what may import what, what each room may know, and what ``import samebits`` may pull in.

Every import statement counts, also inside functions and under ``TYPE_CHECKING``: an arrow is knowledge, not only a
cost at run time.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "samebits"

# From the top down; docs/design.md draws it. A room may import rooms of a lower floor and itself.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "__main__",
        "cli",
        "proof bench warming",
        "apply loading",
        "models patch graphs gate",
        "quant quality",
        "ops",
        "jit",
        "host",
        "bits environment certificate settings capture checkpoint files modules tiny summation",
        "errors",
    )
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}

# Rooms that are several files rather than a folder.
PART_OF = dict.fromkeys(
    (
        "site",
        "signature",
        "guess",
        "verdict",
        "reasons",
        "ledger",
        "trial",
        "awaited",
        "watch",
        "verify",
        "trust",
    ),
    "gate",
)

# Arrows that the floors would allow and the design does not.
FORBIDDEN = {
    ("ops", "environment"): "an op is decided by the signature of its arguments alone",
    ("ops", "certificate"): "verdicts are the gate's business",
    ("ops", "tiny"): "an op knows tensors, not pipelines",
    ("jit", "environment"): "a kernel is compiled for a device, not for a fingerprint",
}

# Packages that only some rooms may know.
KNOWN_BY = {
    package: frozenset(rooms.split())
    for package, rooms in (
        ("cuda", "jit environment capture"),
        ("diffusers", "models patch graphs quant apply proof bench warming cli tiny environment loading"),
        ("transformers", "tiny loading proof bench cli environment"),
        ("accelerate", "models patch quant apply proof bench cli tiny environment"),
        ("huggingface_hub", "loading quant cli"),
        ("click", "cli"),
        ("rich", "apply proof bench cli"),
        ("matplotlib", "bench"),
        ("msgspec", "certificate quality"),
        ("filelock", "certificate bench"),
        ("jinja2", "proof quality"),
        ("torchmetrics", "quality"),
        ("flip_evaluator", "quality"),
    )
}
WITHOUT_TORCH = frozenset({"errors", "settings", "certificate", "checkpoint", "files", "modules"})

# Only where an extra of pyproject.toml brings it: the file asks first whether it is there.
OPTIONAL = {
    "bench/charts.py": "bench",
    "proof/page.py": "prove",
    "quality/metrics.py": "quality",
    "quality/page.py": "quality",
}

# Not in pyproject.toml by name, but part of something that is.
COMES_WITH = {"triton": "torch", "numpy": "diffusers", "PIL": "diffusers"}


@dataclass(frozen=True)
class Arrow:
    """One import: the importing file and room, the imported module, the line."""

    path: Path
    room: str
    module: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.room}) imports {self.module}"


def room_of(path: Path, package: Path) -> str:
    """The room of a file: the first name below the package; the package's own face is ``__init__``."""
    name = path.relative_to(package).parts[0].removesuffix(".py")
    return PART_OF.get(name, name)


def modules_of(node: ast.AST, path: Path, package: Path) -> Iterator[str]:
    """The full names that one syntax node imports; nothing for a node that is no import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = (package.name, *path.relative_to(package).parts[:-1])
            above = here[: len(here) - node.level + 1]
            base = ".".join((*above, base) if base else above)
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if name in {"import_module", "__import__"} and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def arrows(package: Path = PACKAGE) -> list[Arrow]:
    """Every import of every file below ``package``."""
    return [
        Arrow(path, room_of(path, package), module, getattr(node, "lineno", 0))
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        for module in modules_of(node, path, package)
    ]


def wrong_arrows(found: list[Arrow]) -> list[str]:
    """What is wrong with the imports between rooms, a sentence each."""
    wrong = []
    for arrow in found:
        parts = arrow.module.split(".")
        if parts[0] != "samebits" or arrow.room == "__init__" or parts[1:2] in ([], ["__version__"]):
            continue
        target = PART_OF.get(parts[1], parts[1])
        unknown = [room for room in (arrow.room, target) if room not in FLOOR]
        if unknown:
            wrong.append(f"{arrow}: {unknown[0]!r} is on no floor; give a new room its place in FLOORS")
        elif target != arrow.room and FLOOR[target] <= FLOOR[arrow.room]:
            wrong.append(f"{arrow}: {target} is not below {arrow.room}")
        elif (arrow.room, target) in FORBIDDEN:
            wrong.append(f"{arrow}: {FORBIDDEN[arrow.room, target]}")
    return wrong


def wrong_packages(found: list[Arrow]) -> list[str]:
    """Imports of packages that the importing room is not to know."""
    wrong = []
    for arrow in found:
        top = arrow.module.split(".")[0]
        if (top in KNOWN_BY and arrow.room not in KNOWN_BY[top]) or (top == "torch" and arrow.room in WITHOUT_TORCH):
            wrong.append(str(arrow))
    return wrong


def write(package: Path, files: dict[str, str]) -> list[Arrow]:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return arrows(package)


def test_imports_between_rooms_point_one_way() -> None:
    found = arrows()
    assert len(found) > 50, "the walk found next to nothing: it looks in the wrong place"
    assert not wrong_arrows(found)


def test_rooms_know_only_their_packages() -> None:
    assert not wrong_packages(arrows())


def test_only_the_op_record_registers_with_torch_library() -> None:
    """A ``torch.library`` dispatch costs tens of microseconds; nobody may slip one into a call."""
    users = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\btorch\.library\b", re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(), flags=re.DOTALL))
    ]
    assert set(users) <= {"ops/_op.py"}


def test_only_settings_reads_our_environment_variables() -> None:
    strangers = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "settings.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"SAMEBITS_\w+", node.value)
    ]
    assert not strangers


def test_every_imported_package_is_a_declared_dependency() -> None:
    """A package that comes only because another one brings it disappears when that one changes its mind."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names_in(lines: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}

    declared = names_in(project["dependencies"])
    distributions = packages_distributions()
    undeclared = set()
    for arrow in arrows():
        top = arrow.module.split(".")[0]
        top = COMES_WITH.get(top, top)
        if top in sys.stdlib_module_names or top in {"samebits", "__future__"}:
            continue
        names = {name.lower().replace("_", "-") for name in distributions.get(top, [top])}
        extra = OPTIONAL.get(arrow.path.relative_to(PACKAGE).as_posix())
        allowed = declared | names_in(project["optional-dependencies"][extra]) if extra else declared
        if not names & allowed:
            undeclared.add(str(arrow))
    assert not undeclared


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("ops/bad.py", "def f():\n    from samebits.gate import gate\n", "gate is not below ops"),
        ("ops/bad.py", "from .. import models\n", "models is not below ops"),
        ("gate.py", "from samebits import models\n", "models is not below gate"),
        ("bits.py", "from importlib import import_module\nimport_module('samebits.settings')\n", "not below bits"),
        ("jit.py", "if TYPE_CHECKING:\n    import samebits.ops._op\n", "ops is not below jit"),
        ("ops/bad.py", "from ..environment import fingerprint\n", "signature of its arguments"),
        ("errors.py", "import samebits.settings\n", "settings is not below errors"),
        ("attic.py", "from samebits.errors import SamebitsError\n", "'attic' is on no floor"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    complaints = wrong_arrows(write(tmp_path / "samebits", {name: text}))
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_a_right_arrow_passes(tmp_path: Path) -> None:
    files = {
        "ops/good.py": "from samebits import errors, jit\nfrom ._op import Op\nfrom samebits.ops import OPS\n",
        "cli/__init__.py": "def run():\n    from samebits.apply import apply\n    from samebits import __version__\n",
    }
    assert not wrong_arrows(write(tmp_path / "samebits", files))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ops/bad.py", "def f():\n    import diffusers.models\n"),
        ("gate.py", "import cuda.bindings.driver\n"),
        ("certificate.py", "from torch import Tensor\n"),
    ],
)
def test_a_package_in_the_wrong_room_is_found(tmp_path: Path, name: str, text: str) -> None:
    assert wrong_packages(write(tmp_path / "samebits", {name: text}))


def run(code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter in which starting any other program fails; ``before`` runs unguarded."""
    guard = """
        import subprocess, sys

        def refuse(*args, **kwargs):
            raise RuntimeError(f"a program was started: {args[1:] or args}")

        subprocess.Popen.__init__ = refuse
        sys.addaudithook(
            lambda event, args: refuse(event) if event in {"os.posix_spawn", "os.exec", "os.system"} else None
        )

        def loaded(*names):
            return sorted(m for m in sys.modules if m.split(".")[0] in names)
    """
    program = before + textwrap.dedent(guard) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_samebits_loads_nothing_heavy() -> None:
    """Not even torch: a command that prints its help, or another library that looks for us, should not pay for it."""
    done = run("""
        import samebits

        assert "apply" in dir(samebits)
        assert samebits.__version__
        heavy = loaded("torch", "numpy", "cuda", "diffusers", "transformers", "accelerate", "triton", "rich", "click")
        assert not heavy, heavy
        ours = [m for m in loaded("samebits") if m != "samebits"]
        assert not ours, ours
    """)
    assert done.returncode == 0, done.stderr


def test_the_public_names_touch_neither_cuda_nor_a_compiler() -> None:
    """torch and diffusers are imported first: what they touch by themselves is theirs to answer for."""
    done = run(
        """
        theirs = loaded("cuda")
        import samebits

        for name in samebits.__all__:
            getattr(samebits, name)
        import samebits.apply, samebits.bits, samebits.capture, samebits.gate, samebits.jit, samebits.models
        import samebits.ops, samebits.patch

        assert not torch.cuda.is_initialized()
        assert loaded("cuda") == theirs, set(loaded("cuda")) - set(theirs)
        """,
        before="import torch, diffusers.models.transformers.transformer_qwenimage\n"
        "import diffusers.models.transformers.transformer_z_image\n",
    )
    assert done.returncode == 0, done.stderr


def test_the_command_line_loads_torch_only_inside_its_verbs() -> None:
    done = run("""
        import samebits.cli

        heavy = loaded("torch", "numpy", "cuda", "diffusers", "transformers", "accelerate")
        assert not heavy, heavy
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import torch; assert not loaded('torch')",
    ],
)
def test_the_guard_of_the_fresh_interpreter_works(code: str) -> None:
    assert run(code).returncode != 0
