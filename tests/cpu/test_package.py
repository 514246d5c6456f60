"""What an installation holds: every file that the program reads at run time, and the ranges that pyproject promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources() -> set[str]:
    """Every file of the package that is text of ours, by its path below the checkout."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "samebits").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the wheel that this checkout builds."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy: a build leaves its own files beside the sources.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "samebits", folder / "samebits", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "out").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_every_source(wheel: set[str]) -> None:
    """A kernel that is missing in the wheel would be found by the first user only: a checkout has it anyway."""
    ours = sources()
    assert any(name.endswith(".cu") for name in ours)
    assert not ours - wheel


def test_a_wheel_holds_nothing_else(wheel: set[str]) -> None:
    strangers = {name for name in wheel - sources() if ".dist-info/" not in name}
    assert not strangers


def test_a_wheel_brings_licence_and_command(wheel: set[str]) -> None:
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
    assert any(name.endswith("/entry_points.txt") for name in wheel)


def table_of_ranges() -> str:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    return page.split("\n| package | range |")[1].split("\n## ")[0]


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md has a row for each, with the range that pyproject.toml has."""
    page = table_of_ranges()
    for line in PROJECT["dependencies"]:
        name, lower = re.fullmatch(r"([\w-]+)>=([\d.]+),<[\d.]+(?:;.*)?", line).groups()  # type: ignore[union-attr]
        (row,) = re.findall(rf"^\| {name} \| (.*)$", page, re.MULTILINE)
        assert row.startswith(lower), f"{name}: the page says {row.split(' |')[0]!r}, pyproject.toml {line!r}"


def test_the_page_names_no_dependency_that_is_none() -> None:
    named = set(re.findall(r"^\| ([a-z][\w-]+) \|", table_of_ranges(), re.MULTILINE))
    assert named == {re.split(r"[>;<=]", line)[0] for line in PROJECT["dependencies"]}


def test_the_version_is_the_package_s_own() -> None:
    import samebits

    assert samebits.__version__ == PROJECT["version"]


def test_the_pinned_releases_are_inside_the_ranges() -> None:
    """Compared as pip compares them; a pin outside would make the first set-up of a newcomer fail."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "scripts" / "constraints-cpu.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    extras = PROJECT["optional-dependencies"]
    ranges = [Requirement(line) for line in [*PROJECT["dependencies"], *extras["test"], *extras["cu13"]]]
    assert len(pins) > 10
    for requirement in ranges:
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert {requirement.name for requirement in ranges} - set(pins) == set(), "a dependency is not pinned"
