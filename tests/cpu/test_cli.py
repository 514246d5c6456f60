"""The command line: fast to start, one clear line for every mistake, JSON and nothing else where JSON is asked for."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner, Result

import samebits
from samebits import cli, tiny
from samebits.cli import main
from samebits.cli._screen import summary
from samebits.errors import ContractViolation
from samebits.gate import COMPARED


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input must be found before a weight is made or read."""
    monkeypatch.setattr(tiny, "build", lambda *_: pytest.fail("a pipeline was built"))


def test_help_loads_nothing_heavy_and_takes_under_half_a_second() -> None:
    script = (
        "import sys; sys.argv = ['samebits', *sys.argv[1:]]\n"
        "from samebits.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'rich', 'cuda', 'huggingface_hub'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments in (["--help"], ["generate", "--help"], ["env", "--help"], ["--version"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        # Processor time, so that a busy machine does not make it red.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_names_every_verb_and_every_verb_has_help() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    for verb in cli.VERBS:
        assert verb in shown.output
        assert invoke(verb, "--help").exit_code == 0
        assert invoke(verb, "-h").exit_code == 0


def test_version() -> None:
    assert invoke("--version").output == f"samebits {samebits.__version__}\n"


def test_as_a_module_it_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "samebits", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"samebits {samebits.__version__}\n"


def test_env_is_a_table_or_json() -> None:
    shown = invoke("env")
    assert shown.exit_code == 0
    assert re.search(r"^torch version +\d", shown.output, re.MULTILINE)
    found = json.loads(invoke("env", "--json").output)
    assert found["samebits"] == samebits.__version__
    assert found["torch"]["version"]
    assert len(found["digest"]) == 64
    environment = {key: value for key, value in found.items() if key not in {"samebits", "digest", "kernels"}}
    assert set(found["kernels"]) == {"gpu", "host"}
    assert samebits.environment.digest(environment) == found["digest"]  # type: ignore[attr-defined]


MISTAKES = [
    (["bogus"], "No such command 'bogus'"),
    (["generate", "--bogus"], "No such option"),
    (["generate", "a", "b"], "unexpected extra argument"),
    (["generate", "no-such-model", "-p", "x"], "no-such-model: no such model"),
    (["generate", "/no/such/folder", "-p", "x"], "no such model"),
    (["generate", "empty", "-p", "x"], "model_index.json: the file is missing"),
    (["generate", "broken", "-p", "x"], "model_index.json: is not JSON"),
    (["generate", "file.txt", "-p", "x"], "is a file"),
    (["generate", "", "-p", "x"], "no such model"),
    (["generate", "~nobody-has-this-name/x", "-p", "x"], "cannot be looked for on this disk"),
    (["generate", "a" * 5000, "-p", "x", "-o", "x.png"], "cannot be looked for on this disk (File name too long)"),
    (["generate", "a\0b", "-p", "x", "-o", "x.png"], "no such model"),
    (["generate", "empty"], "expected what to paint"),
    (["generate", "-p", "f\udcfcr"], "the prompt is not UTF-8 text (character 1)"),
    (["generate", "--negative-prompt", "\udcff"], "the negative prompt is not UTF-8 text (character 0)"),
    (["generate", "-p", ""], "the prompt is empty"),
    (["generate", "-p", " \n"], "the prompt is empty"),
    (["generate", "--prompt-file", "empty.txt"], "the file empty.txt is empty"),
    (["generate", "--prompt-file", "nope.txt"], "nope.txt: cannot be read (No such file"),
    (["generate", "--prompt-file", "empty"], "cannot be read (Is a directory"),
    (["generate", "--prompt-file", "latin.txt"], "is not UTF-8 text (byte 1)"),
    (["generate", "--prompt-file", "huge.txt"], "longer than 1 MiB"),
    (["generate", "-p", "x", "--prompt-file", "file.txt"], "exclude each other"),
    (["generate", "--size", "100x100"], "multiples of 16, from 16 to 8192 pixels (width first). The nearest is 96x96"),
    (["generate", "--size", "64x0"], "The nearest is 64x16"),
    (["generate", "--size", "99999x64"], "The nearest is 8192x64"),
    (["generate", "--size", "64"], "expected WIDTHxHEIGHT"),
    (["generate", "--size", "64x64x64"], "expected WIDTHxHEIGHT"),
    (["generate", "--size", "-64x64"], "expected WIDTHxHEIGHT"),
    (["generate", "--size", "٦٤x64"], "expected WIDTHxHEIGHT"),
    (["generate", "--dtype", "int8"], "'int8' is not one of 'bf16', 'fp16', 'fp32'"),
    (["generate", "--steps", "0"], "--steps"),
    (["generate", "--steps", "1"], "at least 2 steps"),
    (["generate", "--steps", "many"], "--steps"),
    (["generate", "--seed", "-1"], "--seed"),
    (["generate", "--seed", str(2**63)], "--seed"),
    (["generate", "--guidance", "nan"], "expected a number from 0 up, got nan"),
    (["generate", "--guidance", "-1"], "expected a number from 0 up"),
    (["generate", "--guidance", "inf"], "expected a number from 0 up"),
    (["generate", "--guidance", "1", "--negative-prompt", "x"], "a negative prompt has no effect"),
    (["generate", "--offload", "disk"], "'disk' is not one of"),
    (["generate", "--offload", "model", "--device", "cpu"], "offload"),
    (["generate", "--device", "tpu"], "expected cpu, cuda or cuda:N"),
    (["generate", "--eager", "--prove"], "--eager and --prove exclude each other"),
    (["generate", "--eager", "--host"], "--eager and --host exclude each other"),
    (["generate", "--eager", "--strict"], "--eager and --strict exclude each other"),
    (["generate", "--host", "--device", "cuda"], "--host runs on the CPU"),
    (["generate", "-o", "no/folder/x.png"], "the folder no/folder does not exist"),
    (["generate", "-o", "x.gif"], "ends in .png, .webp, .jpg, .jpeg"),
    (["generate", "-o", "x"], "ends in .png"),
    (["generate", "-o", "folder.png"], "is a folder"),
    (["generate", "-o", "there.png"], "exists already"),
    (["generate", "-o", "a" * 300 + ".png"], "cannot be written"),
    (["generate", "-o", "/proc/x.png"], "cannot be written"),
]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("arguments", "complaint"), MISTAKES, ids=[" ".join(mistake[0])[:60] for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/model_index.json").write_text("{")
    (tmp_path / "file.txt").write_text("a fox")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    (tmp_path / "huge.txt").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "there.png").write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert done.stderr.startswith("samebits: ")
    assert done.stderr.count("\n") == 1

    done = invoke(*arguments, "--json") if arguments[0] == "generate" else done
    if arguments[0] == "generate":
        assert done.exit_code == 2
        assert done.stderr == ""
        assert complaint in json.loads(done.stdout)["error"]
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.png").read_text() == "mine"


@pytest.mark.usefixtures("no_work")
def test_cuda_that_is_not_there_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("generate", "--device", "cuda")
    assert done.exit_code == 2
    assert "no CUDA here" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    done = invoke("generate", "-o", "locked/x.png")
    assert done.exit_code == 2
    assert "cannot be written (Permission denied)" in done.stderr


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("variable", "value"), [("SAMEBITS_DISABLE", "perhaps"), ("SAMEBITS_CACHE_DIR", "~nobody-has-this-name/x")]
)
def test_a_misspelt_variable_is_a_mistake(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    done = invoke("generate")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"samebits: {variable}='{value}' is not understood")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
        (ContractViolation("bits differ"), 3, "bits differ"),
        (RuntimeError("two\nlines"), 3, "failed with RuntimeError: two lines"),
        (MemoryError(), 3, "failed with MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), 3, "out of memory; --offload model or group"),
    ],
)
def test_what_goes_wrong_later_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, line: str
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(tiny, "build", fail)
    done = invoke("generate")
    assert done.exit_code == code
    assert done.stderr.strip().splitlines()[-1].startswith(f"samebits: {line}")
    done = invoke("generate", "--json")
    assert done.exit_code == code
    assert json.loads(done.stdout)["error"].startswith(line)


RUN = (
    "import sys; from samebits import tiny; from samebits.cli import main\n"
    "def fail(*_): raise KeyboardInterrupt\n"
    "tiny.build = fail\n"
    "main(sys.argv[1:])"
)


@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"], ["generate", "--json"], ["--help"]])
@pytest.mark.parametrize("stdout", ["closed", "full"])
def test_a_report_that_nobody_reads_is_no_difference(arguments: list[str], stdout: str) -> None:
    """Exit code 1 says that a proof found a difference, so an unread pipe or a full disk has another one."""
    if stdout == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        read, target = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *arguments], stdout=target, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(target)
    assert done.returncode == (130 if arguments[0] == "generate" else 3), done.stderr
    assert "Exception ignored" not in done.stderr


def test_without_a_stderr_there_is_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "build", lambda *_: pytest.fail("far enough"))
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(pytest.fail.Exception, match="far enough"):
        main.main(["generate"], standalone_mode=False)


def test_without_a_verb_help_is_shown() -> None:
    done = invoke()
    assert done.exit_code == 2
    assert "Usage:" in done.output
    assert "generate" in done.output


def test_the_summary_counts_a_site_as_fused_only_when_eager_answered_nothing_but_comparisons() -> None:
    def row(fused: int, **reasons: int) -> SimpleNamespace:
        named = {COMPARED if name == "compared" else name.replace("_", " "): count for name, count in reasons.items()}
        return SimpleNamespace(fused=fused, reasons=named)

    assert summary([row(3), row(2, compared=1)]) == "2 of 2 sites fused."
    assert summary([row(3), row(0, no_GPU=4)]) == "1 of 2 sites fused; elsewhere: no GPU"
    assert summary([row(0, **{"unsupported: no_GPU": 4})]) == "0 of 1 sites fused: no GPU"
    mixed = [row(2, compared=1, refused=1), row(1, refused=2), row(0, odd=1), row(5)]
    partly = "1 of 4 sites fused, 2 more at some of their calls; elsewhere: refused (1 more reason above)"
    assert summary(mixed) == partly
    assert summary([row(0, compared=1)]) == "0 of 1 sites fused."
