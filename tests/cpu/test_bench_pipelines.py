"""The first picture after ``apply`` on record: fresh processes, an empty and a full kernel cache, what is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from samebits import tiny
from samebits.bench import evidence, pictures, pipelines, reports, tables
from samebits.bench.evidence import PIPELINE
from samebits.bench.pictures import Painted, Timed
from samebits.bench.pipelines import GRAPHS, PLAIN, Request
from samebits.certificate import folder_in
from samebits.cli import _bench_pipeline, main
from samebits.errors import EvidenceError
from samebits.ops import OPS
from samebits.settings import CACHE_DIR

ARGUMENTS = {"prompt": "x", "width": 32, "height": 32, "num_inference_steps": 1, "guidance_scale": 0.0}


def painted(seconds: float) -> Painted:
    parts = {"text encoder": 0.5, "denoiser": seconds - 1.25, "VAE": 0.25, "rest": 0.5}
    return Painted(seconds, parts, [100.0, 120.0], torch.zeros(1, 1, 3, dtype=torch.uint8))


def timed(first: float = 12.0, **changes: Any) -> Timed:
    runs = dict(zip(pictures.RUNS, map(painted, (11.0, 10.0, first, 6.0)), strict=True))
    return Timed(runs, **{"bits_equal": True, "fused": 30, "eager": 2, **changes})


def rows(model: str = "z-image", mode: str = PLAIN, cold: Timed | None = None, warm: Timed | None = None) -> Any:
    return pipelines.rows_of(model, 1024, 4, mode, cold or timed(19.0), warm or timed())


# Processes.


def build(note: str, device: torch.device) -> Any:
    """Runs in a child: leaves a note of which process this is and where its kernel cache is."""
    Path(note).write_text(f"{os.getpid()} {os.environ[CACHE_DIR]}")
    return tiny.build("tiny-z-image", torch.bfloat16).to(device)


def test_a_fresh_process_paints_with_the_cache_it_is_told(tmp_path: Path) -> None:
    request = Request("tiny", partial(build, str(tmp_path / "note")), "cpu", ARGUMENTS)
    found = pipelines.apart(request, tmp_path / "cache")
    process, cache = (tmp_path / "note").read_text().split()
    assert int(process) != os.getpid()
    assert cache == str(tmp_path / "cache")
    assert list(found.runs) == list(pictures.RUNS)
    assert found.bits_equal
    assert not found.one_colour
    assert found.more_s is not None


def test_the_cache_is_empty_first_and_then_holds_what_was_compiled() -> None:
    seen: list[tuple[Path, list[str]]] = []
    told: list[str] = []

    def run(request: Request, cache: Path) -> Timed:
        seen.append((cache, [path.name for path in cache.iterdir()]))
        (cache / "kernel").touch()
        folder_in(cache).mkdir()
        (folder_in(cache) / "verdict").touch()
        return timed(15.0 - len(seen))

    request = Request("z-image", lambda device: None, "cuda", {})
    cold, warm = pipelines.cold_and_warm(request, told.append, run)
    assert [names for _, names in seen] == [[], ["kernel"]], "a verdict from before would spare the comparisons"
    assert seen[0][0] == seen[1][0]
    assert not seen[0][0].exists(), "the folder is not left behind"
    assert (cold.more_s, warm.more_s) == (4.0, 3.0)
    assert told == ["z-image: with a cold kernel cache", "z-image: with a warm kernel cache"]


# Rows.


def test_rows_say_what_the_first_picture_took_more() -> None:
    made = rows()
    assert [row["variant"] for row in made] == list(evidence.PICTURES)
    assert all(PIPELINE.problem(row) is None for row in made)
    assert [row["s_more"] for row in made] == [None, None, 9.0, 2.0, None]
    assert [row["s"] for row in made] == [11.0, 10.0, 19.0, 12.0, 6.0]
    assert made[-1] | {"s_text_encoder": 0.5, "s_denoiser": 4.75, "s_vae": 0.25, "s_rest": 0.5, "calls": 2} == made[-1]
    assert [row["fused"] for row in made] == [0, 0, 30, 30, 30]
    assert [(t.wanted, t.got, t.reached) for t in pipelines.targets(made)] == [
        ("<= 3 s", "+2.00 s", True),
        ("<= 10 s", "+9.00 s", True),
    ]
    late = pipelines.targets(rows(cold=timed(20.5), warm=timed(13.01)))
    assert [target.reached for target in late] == [False, False]


def test_no_time_of_ours_is_kept_where_pixels_differ() -> None:
    made = rows(warm=timed(bits_equal=False))
    assert all(PIPELINE.problem(row) is None for row in made)
    times = {row["variant"]: (row["s"], row["s_denoiser"], row["s_more"]) for row in made}
    assert times["ours_first"] == times["ours"] == (None, None, None)
    assert times["eager"] == (10.0, 8.75, None)
    assert times["ours_first_cold"][0] == 19.0
    assert [target.reached for target in pipelines.targets(made)] == [False, True]
    for column in ("s", "s_vae", "s_more"):
        problem = PIPELINE.problem({**made[-1], column: 1.0})
        assert problem is not None
        assert "bits differ" in problem


@pytest.mark.parametrize(
    ("column", "value"),
    [("s_more", "2"), ("s_more", float("inf")), ("variant", "ours_second"), ("s", 0), ("mode", ""), ("more", 1)],
)
def test_rows_that_are_not_what_they_must_be(column: str, value: Any) -> None:
    assert PIPELINE.problem({**rows()[3], "s_more": -0.5}) is None, "the first picture may be the faster one"
    problem = PIPELINE.problem({**rows()[3], column: value})
    assert problem is not None
    assert column in problem


def source() -> dict[str, Any]:
    return {"package": "0123", "ops": {op.name: op.source_hash for op in OPS}}


MACHINE = {"gpu": {"name": "NVIDIA Pretend 9"}, "torch": {"version": "2.99.0"}}


def test_pictures_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    both = [*rows(), *rows("qwen-image")]
    pipelines.record(both, "first", MACHINE, source()).write(tmp_path)
    there = evidence.earlier(tmp_path / "pipeline.json", source(), MACHINE)
    made = pipelines.record([*rows(warm=timed(12.5)), *rows(mode=GRAPHS)], "second", MACHINE, source(), there)
    assert made.command == "first; second"
    found = pipelines.groups(made.rows)
    assert list(found) == [
        ("qwen-image", 1024, 4, PLAIN),
        ("z-image", 1024, 4, PLAIN),
        ("z-image", 1024, 4, GRAPHS),
    ]
    assert found["z-image", 1024, 4, PLAIN]["ours_first"]["s_more"] == 2.5


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"package": "9"}, {}, "another source"),
        ({}, {"gpu": {"name": "NVIDIA Other"}}, "another GPU"),
        ({}, {"torch": {"version": "3"}}, "another torch"),
    ],
)
def test_nothing_is_added_to_a_record_from_elsewhere(
    tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    pipelines.record(rows(), "first", MACHINE, {**source(), **then}).write(tmp_path)
    with pytest.raises(EvidenceError, match=said):
        evidence.earlier(tmp_path / "pipeline.json", source(), {**MACHINE, **now})


def test_a_record_becomes_a_page_and_a_table(tmp_path: Path) -> None:
    record = pipelines.record(rows(), "samebits bench pipeline z-image", MACHINE, source())
    written, missing = reports.write(record, tmp_path, pipelines.targets(record.rows))
    assert ([path.name for path in written], missing) == (["pipeline.md"], None)
    line = "| z-image | 1024 | 4 | launch by launch | ours, first, warm kernel cache | 12.000 | 1.200 | +2.00 s |"
    assert line in written[0].read_text()
    machine = tables.Machine("pretend", {"pipeline": record})
    shown = tables.pipeline_table([machine], OPS)
    assert line in shown
    assert "warm kernel cache, more than eager's | <= 3 s | +2.00 s | yes |" in shown
    old = pipelines.record(rows(), "then", MACHINE, {"package": "0", "ops": {}})
    assert "Not yet measured" in tables.pipeline_table([tables.Machine("pretend", {"pipeline": old})], OPS)


# The command, on a GPU that is made up.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """A GPU as far as the command asks, and what it was asked to paint."""
    asked: list[Request] = []

    def paint(request: Request, say: Callable[[str], object]) -> tuple[Timed, Timed]:
        asked.append(request)
        return timed(19.0), timed()

    monkeypatch.setattr("samebits.loading.device.find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(pipelines, "cold_and_warm", paint)
    monkeypatch.setattr(pipelines, "here", lambda request, say: (asked.append(request), timed(19.0))[1])
    monkeypatch.setattr("samebits.environment.fingerprint", lambda: MACHINE)
    return asked


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "pipeline", *arguments])


def test_the_command_writes_its_record(gpu: list[Request], tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--steps", "4")
    done = invoke("z-image", *out)
    assert done.exit_code == 0, done.output
    assert "warm kernel cache: +2.00 s against eager's picture, within 3 s." in done.stdout
    assert "cold kernel cache: +9.00 s against eager's picture, within 10 s." in done.stdout
    assert f"written: pipeline.json, pipeline.md in {tmp_path}" in done.stdout
    record = evidence.read(tmp_path / "pipeline.json")
    assert record.command == "samebits bench pipeline z-image --size 1024 --steps 4"
    assert [row["variant"] for row in record.rows] == list(evidence.PICTURES)
    done = invoke("qwen-image", *out, "--add", "--cuda-graphs", "--seed", "3", "--json")
    document = json.loads(done.stdout)
    assert [(one["cache"], one["s_more_than_eager"], one["within"]) for one in document["first_picture"]] == [
        ("warm kernel cache", 2.0, True),
        ("cold kernel cache", 9.0, True),
    ]
    record = evidence.read(tmp_path / "pipeline.json")
    assert record.command.endswith("; samebits bench pipeline qwen-image --size 1024 --steps 4 --cuda-graphs --seed 3")
    assert {(row["model"], row["mode"]) for row in record.rows} == {("z-image", PLAIN), ("qwen-image", GRAPHS)}
    assert [(one.name, one.cuda_graphs, one.seed) for one in gpu] == [("z-image", False, 0), ("qwen-image", True, 3)]
    assert gpu[0].arguments["guidance_scale"] == 0.0
    invoke("z-image", *out)
    assert {row["model"] for row in evidence.read(tmp_path / "pipeline.json").rows} == {"z-image"}, "without --add"


def test_only_what_anybody_can_paint_again_goes_into_the_evidence(
    gpu: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bench_pipeline, "folder_of", lambda out: tmp_path if out is None else out)
    assert invoke("tiny-z-image").exit_code == 0
    assert not list(tmp_path.iterdir())
    assert invoke("z-image").exit_code == 0
    assert (tmp_path / "pipeline.json").exists()


@pytest.mark.usefixtures("gpu")
def test_a_record_that_nothing_can_be_added_to_is_found_before_anything_is_painted(
    gpu: list[Request], tmp_path: Path
) -> None:
    (tmp_path / "pipeline.json").write_text("{")
    done = invoke("z-image", "--out", str(tmp_path), "--add")
    assert done.exit_code == 2
    assert "not JSON" in done.stderr
    assert not gpu


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("z-image", "--no-cold", "--out", "x"), "--no-cold measures with whatever"),
        (("z-image", "--no-cold", "--add"), "--no-cold measures with whatever"),
        (("tiny-z-image", "--add"), "leaves one with --out only"),
        (("nope",), "no such model. Expected qwen-image, z-image, tiny-qwen-image, tiny-z-image"),
    ],
)
def test_bad_input_on_a_gpu(arguments: tuple[str, ...], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.usefixtures("gpu")
def test_in_the_process_at_hand_nothing_is_known_of_the_cache(tmp_path: Path) -> None:
    done = invoke("z-image", "--no-cold")
    assert done.exit_code == 0
    assert "kernel cache as it was: +9.00 s" in done.stdout
    assert "written" not in done.stdout


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("which", [0, 1])
def test_other_pixels_in_either_process_are_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: int
) -> None:
    pair = [timed(19.0), timed()]
    pair[which] = timed(bits_equal=False)
    monkeypatch.setattr(pipelines, "cold_and_warm", lambda request, say: tuple(pair))
    done = invoke("z-image", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "DIFFERENT" in done.stdout
    assert (tmp_path / "pipeline.json").exists()
