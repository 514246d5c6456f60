"""``samebits generate`` from command to picture and proof, on the embedded pipelines."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from denoisers import PRODUCTS
from diffusers import DiffusionPipeline
from PIL import Image

import samebits.apply  # noqa: F401  # so that its module can be found and patched below
from samebits import tiny
from samebits.apply import Rechecks
from samebits.cli import _output, main
from samebits.gate import Revocation

QUICK = ["--size", "64x64", "--steps", "2", "--device", "cpu"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", *arguments])


def invoke_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == code, done.output
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="session")
def built() -> dict[str, DiffusionPipeline]:
    return {name: tiny.build(name, torch.bfloat16) for name in tiny.NAMES}


@pytest.fixture(autouse=True)
def _quick_and_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: dict[str, DiffusionPipeline]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = tiny.build
    monkeypatch.setattr(
        tiny, "build", lambda name, dtype: built[name] if dtype is torch.bfloat16 else whole(name, dtype)
    )


class FakeHandle:
    """What ``apply`` returns, as far as the command line uses it, with one site that did or did not fuse."""

    def __init__(self, fused: int = 2, reasons: dict[str, int] | None = None) -> None:
        self.removed = 0
        self.recheck_every: int | None = None
        self.rechecks = Rechecks()
        self.row = SimpleNamespace(
            site="norm_out", op="layer_norm_modulate", fused=fused, eager=0, reasons=reasons or {}
        )

    def report(self) -> Any:
        rows = [self.row]
        return SimpleNamespace(
            rows=rows,
            graphs=(),
            notes=(),
            rechecks=self.rechecks,
            to_json=lambda: [dict(vars(row)) for row in rows],
            __str__=lambda: "table",
        )

    def remove(self) -> None:
        self.removed += 1


def read(path: str | Path) -> SimpleNamespace:
    """Size, format and raw pixels of a picture on disk."""
    with Image.open(path) as image:
        image.load()
        return SimpleNamespace(size=image.size, format=image.format, pixels=image.convert("RGB").tobytes())


def plant(monkeypatch: pytest.MonkeyPatch, change: Any = None, handle: FakeHandle | None = None) -> FakeHandle:
    """Put ``apply`` aside: the fused run is an eager run on whose denoiser ``change(pipeline)`` was let loose."""
    handle = handle or FakeHandle()

    def apply(
        pipeline: DiffusionPipeline, *, strict: bool, host: bool, cuda_graphs: bool, recheck_every: int | None
    ) -> FakeHandle:
        handle.recheck_every = recheck_every
        if change is not None:
            hook = change(pipeline)
            remove = handle.remove
            monkeypatch.setattr(handle, "remove", lambda: (hook.remove(), remove()))
        return handle

    monkeypatch.setattr(sys.modules["samebits.apply"], "apply", apply)
    return handle


def one_ulp(step: int, calls_before: int = 0) -> Any:
    """A change that moves one element of the denoiser's output by one ulp at a step, counted from 1."""

    def change(pipeline: DiffusionPipeline) -> Any:
        count = -calls_before

        def hook(module: torch.nn.Module, args: Any, outputs: Any) -> None:
            nonlocal count
            count += 1
            if count == step:
                outputs[0][0].view(torch.int16).view(-1)[5] += 1

        return pipeline.transformer.register_forward_hook(hook)

    return change


@pytest.mark.parametrize("model", tiny.NAMES)
def test_a_picture_with_its_report(tmp_path: Path, model: str, built: dict[str, DiffusionPipeline]) -> None:
    done = invoke(model, *QUICK, "-p", "a red fox", "--seed", "7", "-o", "fox.png")
    assert done.exit_code == 0, done.output
    image = read(tmp_path / "fox.png")
    assert (image.size, image.format) == ((64, 64), "PNG")
    assert f"{model} on cpu (bf16, 64x64, 2 steps, seed 7)" in done.stdout
    # Without a GPU no site is fused, and one line says why.
    assert "sites fused: the tensors are on the CPU" in done.stdout
    assert f"sha256 of the pixels {hashlib.sha256(image.pixels).hexdigest()}" in done.stdout
    assert done.stderr == ""
    # diffusers alone paints the same picture.
    guidance = {"true_cfg_scale": 1.0} if model == "tiny-qwen-image" else {"guidance_scale": 5.0}
    alone = built[model](
        "a red fox",
        width=64,
        height=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        **guidance,
    )
    assert alone.images[0].tobytes() == image.pixels


@pytest.mark.parametrize("model", tiny.NAMES)
def test_the_json_is_what_the_documentation_says(tmp_path: Path, model: str) -> None:
    found = invoke_json(model, *QUICK, "--prove", "-o", "fox.png")
    assert list(found) == [
        "model",
        "device",
        "output",
        "warnings",
        "seconds",
        "sha256",
        "sites",
        "cuda_graphs",
        "rechecks",
        "notes",
        "proof",
    ]
    assert (found["model"], found["device"], found["output"]) == (model, "cpu", "fox.png")
    assert set(found["seconds"]) == {"load", "eager", "eager_again", "fused"}
    assert all(isinstance(value, float) for value in found["seconds"].values())
    assert len(found["sha256"]["latents"]) == 2
    pixels = read(tmp_path / "fox.png").pixels
    assert found["sha256"]["image"] == hashlib.sha256(pixels).hexdigest()
    assert len(found["sites"]) > 10
    for site in found["sites"]:
        assert list(site) == ["site", "op", "fused", "eager", "reasons"]
        assert site["fused"] == 0
        if site["op"] in PRODUCTS:  # nobody's eager calls: the site of the activation alone has them, and counts them
            assert site["eager"] == 0
            assert all("on the CPU" in reason and calls > 0 for reason, calls in site["reasons"].items())
            continue
        assert sum(site["reasons"].values()) == site["eager"]
        (reason,) = site["reasons"]
        elsewhere = ("its lines run ", "the two streams are served one by one")
        assert "on the CPU" in reason if site["eager"] else reason.startswith(elsewhere)
    assert sum(site["eager"] > 0 for site in found["sites"]) > 10
    assert found["proof"] == {"equal": True, "void": False, "steps": 2, "first_difference": None}
    assert found["rechecks"] == {"compared": 0, "differed": 0, "awaited": 0, "revocations": []}


def test_recheck_every_reaches_apply_and_what_it_found_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = plant(monkeypatch)
    found = Revocation("norm_out", "layer_norm_modulate", "x: bfloat16[1, 2, 64] cpu", "1 of 128 elements differ")
    handle.rechecks = Rechecks(5, 1, 0, (found,))
    rechecks = invoke_json("tiny-z-image", *QUICK, "--recheck-every", "3", "-o", "fox.png")["rechecks"]
    assert handle.recheck_every == 3
    assert rechecks == {"compared": 5, "differed": 1, "awaited": 0, "revocations": [vars(found)]}
    invoke_json("tiny-z-image", *QUICK, "-o", "fox2.png")
    assert handle.recheck_every is None
    assert invoke_json("tiny-z-image", *QUICK, "--eager", "-o", "fox3.png")["rechecks"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recheck-every", "-1"], "Invalid value for '--recheck-every': -1 is not in the range"),
        (["--recheck-every", "often"], "'often' is not a valid integer range"),
        (["--recheck-every", "3", "--eager"], "--eager and --recheck-every exclude each other"),
    ],
)
def test_a_wrong_recheck_every_is_one_line_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    done = invoke("tiny-z-image", *QUICK, *arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_the_same_seed_gives_the_same_hashes_and_another_seed_others() -> None:
    first = invoke_json(*QUICK, "-o", "a.png")
    assert first["sha256"] == invoke_json(*QUICK, "-o", "b.png")["sha256"]
    assert first["sha256"] == invoke_json(*QUICK, "-o", "c.png", "--eager")["sha256"]
    assert first["sha256"]["image"] != invoke_json(*QUICK, "-o", "d.png", "--seed", "1")["sha256"]["image"]
    assert first["proof"] is None


def test_eager_applies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["samebits.apply"], "apply", lambda *_, **__: pytest.fail("applied"))
    found = invoke_json(*QUICK, "--eager", "-o", "fox.png")
    assert found["sites"] == []
    assert set(found["seconds"]) == {"load", "eager"}


def test_a_proof_of_nothing_says_so() -> None:
    done = invoke(*QUICK, "--prove", "-o", "fox.png")
    assert done.exit_code == 0
    assert "Equal: the latents after each of 2 steps" in done.stdout
    assert "no site was fused: eager was compared with eager" in done.stdout


def test_a_proof_of_fused_sites_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = plant(monkeypatch)
    done = invoke(*QUICK, "--prove", "-o", "fox.png")
    assert done.exit_code == 0
    assert "1 of 1 sites fused." in done.stdout
    assert "eager was compared with eager" not in done.stdout
    assert handle.removed == 1


@pytest.mark.parametrize("step", [1, 2])
def test_one_ulp_in_one_step_is_exit_code_1_and_names_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    handle = plant(monkeypatch, one_ulp(step))
    clean = invoke_json("tiny-z-image", *QUICK, "--eager", "-o", "clean.png")
    found = invoke_json("tiny-z-image", *QUICK, "--prove", "-o", "fox.png", code=1)
    proof = found["proof"]
    assert (proof["equal"], proof["void"], proof["steps"]) == (False, False, 2)
    first = proof["first_difference"]
    assert (first["where"], first["step"]) == ("latents", step)
    assert first["expected"] == clean["sha256"]["latents"][step - 1] == found["sha256"]["latents"][step - 1]
    assert first["actual"] != first["expected"]
    # Eager is the definition of right: its picture is the output, and the other one is kept beside it.
    assert read("fox.png").pixels == read("clean.png").pixels
    assert (tmp_path / "fox.different.png").exists()
    assert handle.removed == 1


def test_a_difference_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, one_ulp(2))
    done = invoke("tiny-z-image", *QUICK, "--prove", "-o", "fox.png")
    assert done.exit_code == 1
    assert "DIFFERENT from eager. First in the latents after step 2: 1 of 1024 elements differ" in done.stdout


def test_an_eager_that_differs_from_itself_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: dict[str, DiffusionPipeline]
) -> None:
    plant(monkeypatch)
    # Two steps of the first run, then step 2 of the second.
    hook = one_ulp(2, calls_before=2)(built["tiny-z-image"])
    try:
        found = invoke_json("tiny-z-image", *QUICK, "--prove", "-o", "fox.png", code=1)
    finally:
        hook.remove()
    assert (found["proof"]["equal"], found["proof"]["void"]) == (False, True)
    assert found["proof"]["first_difference"]["step"] == 2
    assert found["sites"]
    hook = one_ulp(2, calls_before=2)(built["tiny-z-image"])
    try:
        done = invoke("tiny-z-image", *QUICK, "--prove", "-o", "void.png")
    finally:
        hook.remove()
    assert done.exit_code == 1
    assert "Void: eager does not repeat itself on this machine" in done.stdout
    assert (tmp_path / "void.png").exists()
    assert not list(tmp_path.glob("*.different.png"))


def test_a_fused_run_that_dies_leaves_eagers_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(pipeline: DiffusionPipeline) -> Any:
        def hook(*_: Any) -> None:
            raise RuntimeError("the GPU fell off the bus")

        return pipeline.transformer.register_forward_hook(hook)

    handle = plant(monkeypatch, die)
    done = invoke(*QUICK, "--prove", "-o", "fox.png")
    assert done.exit_code == 3
    assert "failed with RuntimeError: the GPU fell off the bus" in done.stderr
    assert read(tmp_path / "fox.png").size == (64, 64)
    assert handle.removed == 1


def test_a_report_that_fails_does_not_lose_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = FakeHandle()
    monkeypatch.setattr(handle, "report", lambda: 1 / 0)
    plant(monkeypatch, handle=handle)
    assert invoke(*QUICK, "-o", "fox.png").exit_code == 3
    assert read(tmp_path / "fox.png").size == (64, 64)


def test_strict_and_host_reach_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        sys.modules["samebits.apply"], "apply", lambda pipeline, **options: asked.append(options) or FakeHandle()
    )
    invoke_json(*QUICK, "-o", "a.png", "--strict")
    invoke_json("--size", "64x64", "--steps", "2", "-o", "b.png", "--host")
    invoke_json("--size", "64x64", "--steps", "2", "-o", "c.png", "--cuda-graphs")
    off = {"strict": False, "host": False, "cuda_graphs": False, "recheck_every": None}
    assert asked == [off | {"strict": True}, off | {"host": True}, off | {"cuda_graphs": True}]


def test_the_prompt_comes_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("\ufeffein für die Füchse\n", encoding="utf-8")
    from_file = invoke_json(*QUICK, "--prompt-file", "prompt.txt", "-o", "a.png")
    typed = invoke_json(*QUICK, "-p", "ein für die Füchse", "-o", "b.png")
    assert from_file["sha256"] == typed["sha256"]
    assert from_file["sha256"] != invoke_json(*QUICK, "-o", "c.png")["sha256"]


def test_guidance_and_negative_prompt_change_the_picture() -> None:
    for model in tiny.NAMES:
        hashes = {
            invoke_json(model, *QUICK, *more, "--force", "-o", "x.png")["sha256"]["image"]
            for more in (["--guidance", "0"], ["--guidance", "3"], ["--guidance", "3", "--negative-prompt", "blur"])
        }
        assert len(hashes) == 3


def test_width_comes_first_and_dtype_is_used() -> None:
    found = invoke_json("--steps", "2", "--size", "96x32", "--dtype", "fp32", "-o", "x.png")
    assert read("x.png").size == (96, 32)
    assert found["sha256"] != invoke_json("--steps", "2", "--size", "96x32", "-o", "y.png")["sha256"]


def test_a_saved_pipeline_paints_what_the_embedded_one_does(
    tmp_path: Path, built: dict[str, DiffusionPipeline]
) -> None:
    built["tiny-z-image"].save_pretrained(tmp_path / "model")
    found = invoke_json("./model", *QUICK, "-p", "a fox", "-o", "a.png")
    assert found["model"] == "./model"
    assert found["sha256"] == invoke_json("tiny-z-image", *QUICK, "-p", "a fox", "-o", "b.png")["sha256"]


def test_pixels_that_show_nothing_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(pipeline: DiffusionPipeline) -> Any:
        return pipeline.transformer.register_forward_hook(lambda module, args, outputs: (outputs[0] * float("nan"),))

    plant(monkeypatch, blind)
    done = invoke(*QUICK, "-o", "fox.png")
    assert done.exit_code == 0
    assert "the last latents hold NaN or infinity" in done.stdout


# The output file.


@pytest.fixture
def image() -> Image.Image:
    return Image.frombytes("RGB", (40, 40), (b"bright, varied and meaningless" * 160)[:4800])


@pytest.mark.parametrize("ending", sorted(_output.FORMATS))
def test_each_format_is_written(tmp_path: Path, image: Image.Image, ending: str) -> None:
    path = _output.save(image, tmp_path / f"x{ending}", False)
    back = read(path)
    assert back.size == image.size
    assert (back.pixels == image.tobytes()) == (ending in {".png", ".webp"})


def test_force_overwrites_and_keeps_a_link(tmp_path: Path, image: Image.Image) -> None:
    (tmp_path / "real.png").write_text("old")
    (tmp_path / "link.png").symlink_to("real.png")
    assert _output.save(image, tmp_path / "link.png", True) == tmp_path / "link.png"
    assert (tmp_path / "link.png").is_symlink()
    assert read(tmp_path / "real.png").size == image.size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.png", "real.png"]


def test_a_file_made_meanwhile_is_not_overwritten(tmp_path: Path, image: Image.Image) -> None:
    path = tmp_path / "fox.png"
    _output.check(path, False)
    path.write_text("somebody else's")
    assert _output.save(image, path, False) == tmp_path / "fox-1.png"
    assert path.read_text() == "somebody else's"
    assert _output.save(image, path, False) == tmp_path / "fox-2.png"


def test_a_file_system_without_links_is_fine(
    tmp_path: Path, image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert _output.save(image, tmp_path / "fox.png", False) == tmp_path / "fox.png"
    assert _output.save(image, tmp_path / "fox.png", False) == tmp_path / "fox-1.png"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_file_has_the_usual_permissions(tmp_path: Path, image: Image.Image) -> None:
    old = os.umask(0o027)
    try:
        path = _output.save(image, tmp_path / "fox.png", False)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_disk_that_fills_up_does_not_lose_the_picture(
    tmp_path: Path, image: Image.Image, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuge = tmp_path / "refuge"
    refuge.mkdir()
    monkeypatch.setattr(_output.tempfile, "gettempdir", lambda: str(refuge))
    real = os.fsync
    calls: list[int] = []

    def full_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_once)
    assert _output.save(image, tmp_path / "fox.png", False) == refuge / "fox.png"
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["refuge"]


def test_the_output_is_written_whole_or_not_at_all(
    tmp_path: Path, image: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fox.png").write_text("old")

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(image, "save", die)
    with pytest.raises(KeyboardInterrupt):
        _output.save(image, tmp_path / "fox.png", True)
    assert [path.name for path in tmp_path.iterdir()] == ["fox.png"]
    assert (tmp_path / "fox.png").read_text() == "old"


def test_interrupting_a_run_is_clean(tmp_path: Path) -> None:
    script = (
        "import signal, os\n"
        "from samebits.proof import pictures\n"
        "def paint(*_): os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)\n"
        "pictures.paint = paint\n"
        "from samebits.cli import main\n"
        "main(['generate', '--size', '64x64', '-o', 'fox.png'])"
    )
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=one_thread)
    assert done.returncode == 130
    assert done.stderr.strip() == "samebits: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", tiny.NAMES)
def test_cuda_graphs_without_a_gpu_are_told_about(model: str) -> None:
    found = invoke_json(model, *QUICK, "--cuda-graphs", "-o", "a.png")
    (row,) = found["cuda_graphs"]
    assert row["model"] == "transformer"
    assert (row["replayed"], row["graphs"]) == (0, 0)
    assert row["plain"] >= 2
    (reason,) = row["reasons"]
    assert "is a tensor on cpu, not on cuda" in reason
    assert invoke_json(model, *QUICK, "-o", "b.png")["cuda_graphs"] == []
    told = invoke(model, *QUICK, "--cuda-graphs", "-o", "c.png").stdout
    assert "cuda graph of transformer: replayed 0, plain" in told


def test_cuda_graphs_and_eager_exclude_each_other() -> None:
    done = invoke("--eager", "--cuda-graphs")
    assert done.exit_code == 2
    assert "--eager and --cuda-graphs exclude each other" in done.stderr
