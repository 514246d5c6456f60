"""Certificates and warming on a real GPU: what one process verified, the next one uses without a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import samebits
from samebits import tiny
from samebits.certificate import folder_in, inspect, name_of
from samebits.cli import main
from samebits.environment import certified
from samebits.gate import COMPARED, Gate
from samebits.ops import by_name
from samebits.settings import CACHE_DIR, settings

pytestmark = pytest.mark.gpu

SERVED = ["--sizes", "64,128x64", "--batch", "1,2", "--tokens", "32,40", "--guidance", "0"]

PAINTS = """
import json, sys
import torch
import samebits
from samebits import tiny
from samebits.gate import Gate
from samebits.trust import default_store
from samebits.warming import Texts

name, trust, flag = sys.argv[1:]
if flag == "tf32":
    torch.backends.cuda.matmul.allow_tf32 = True
pipe = tiny.build(name, torch.bfloat16).to("cuda")
pipe.set_progress_bar_config(disable=True)
sys.stdin.readline()  # up to here it has read nothing that is stored
gate = Gate(store=default_store(), trust=trust)
handle = samebits.apply(pipe, gate=gate)
off = {"true_cfg_scale": 1.0} if name == "tiny-qwen-image" else {"guidance_scale": 0.0}
texts = Texts(pipe)
words = texts.arguments([texts.long(40)], None)
pipe(width=128, height=64, num_inference_steps=2, output_type="latent", **words, **off)
torch.cuda.synchronize()
verdicts = gate.verdicts()
print(json.dumps({
    "eager": sum(row.eager for row in handle.report().rows),
    "fused": sum(row.fused for row in handle.report().rows),
    "bases": sorted({verdict.basis for verdict in verdicts}),
    "states": sorted({verdict.state.value for verdict in verdicts}),
}))
"""


class Painter:
    """A process that gets ready at once and paints one picture when asked, with what is in a folder then."""

    def __init__(self, folder: Path, name: str, trust: str, flag: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PAINTS, name, trust, flag],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, CACHE_DIR: str(folder)},
        )

    def __enter__(self) -> Painter:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:  # waits for it, and closes what it was read from
            pass

    def paint(self) -> dict[str, Any]:
        """Have it paint; what it says about its picture."""
        out, errors = self._process.communicate("now\n", timeout=300)
        assert self._process.returncode == 0, errors
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


def folder_beside(kernels: Path, path: Path) -> Path:
    """A folder without certificates, with the compiled kernels of another one: what is under test here are verdicts."""
    path.mkdir(mode=0o700)
    (path / kernels.name).symlink_to(kernels)
    return path


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_warmed_deployment_compares_nothing_in_the_next_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = settings().cache_dir / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    never, served = (folder_beside(kernels, tmp_path / which) for which in ("never-warmed", "served"))
    monkeypatch.setenv(CACHE_DIR, str(served))
    # Most of a process is spent on imports. So all begin at once, and each is asked when it is its turn.
    with (
        Painter(never, name, "anew") as first,
        Painter(served, name, "stored") as believing,
        Painter(served, name, "hint") as checking,
        Painter(served, name, "stored", "tf32") as elsewhere,
    ):
        done = CliRunner().invoke(main, ["warm", name, *SERVED, "--json"])
        assert done.exit_code == 0, done.output
        cold, (certificate,) = first.paint(), inspect(folder_in(served))
        stored, hint, other = believing.paint(), checking.paint(), elsewhere.paint()
    assert cold["eager"] > 0, "the control: without a certificate the first calls are compared"
    calls = cold["fused"] + cold["eager"]
    found = json.loads(done.stdout)
    assert found["certificate"]["verdicts"] >= sum(row["verified"] for row in found["ops"]) > 0
    assert certificate.name == name_of(certified()) == found["certificate"]["name"]
    assert certificate.environment["gpu"]["uuid"]
    assert {verdict.state for verdict in certificate.verdicts} == {"verified"}
    assert stored == {"eager": 0, "fused": calls, "bases": ["a stored verdict"], "states": ["verified"]}
    # How many calls go by until the answers are there is a matter of time.
    assert hint["eager"] > 0
    assert hint["fused"] + hint["eager"] == calls
    assert hint["states"] == ["verified"]
    assert "a stored verdict and a call" in hint["bases"]
    assert "a stored verdict" not in hint["bases"]
    assert other["eager"] == cold["eager"], "another flag is another environment"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_graphs_after_warming_meet_no_unknown_signature(name: str, device: torch.device) -> None:
    pipe = tiny.build(name, torch.bfloat16).to(device)
    pipe.set_progress_bar_config(disable=True)
    off = {"true_cfg_scale": 1.0} if name == "tiny-qwen-image" else {"guidance_scale": 0.0}
    with samebits.apply(pipe, gate=Gate(), cuda_graphs=True) as handle:
        warmth = samebits.warm(
            pipe, handle, sizes=[(64, 64), (128, 64)], batches=[1, 2], tokens=[32, 40], arguments=off
        )
        assert warmth.good, handle.report()
        before = handle.report()
        from samebits.warming import Texts

        texts = Texts(pipe)
        for size in ((64, 64), (128, 64)):
            for batch in (1, 2):
                for _ in range(4):  # plain, captured, replayed
                    words = texts.arguments([texts.long(40)] * batch, None)
                    pipe(width=size[0], height=size[1], num_inference_steps=2, output_type="latent", **words, **off)
        after = handle.report()
        assert after.graphs[0].replayed > before.graphs[0].replayed
        assert [row.eager for row in after.rows] == [row.eager for row in before.rows], "no call was eager"
        # But for calls that a product left to another site, which are nobody's eager calls.
        told = [[row.reasons for row in report.rows if not by_name(row.op).is_product] for report in (before, after)]
        assert told[0] == told[1]
        assert not handle.gate.pending
        pipe(
            width=256,
            height=64,
            num_inference_steps=2,
            output_type="latent",
            **texts.arguments([texts.long(40)], None),
            **off,
        )
        compared = [sum(row.reasons.get(COMPARED, 0) for row in report.rows) for report in (after, handle.report())]
        assert compared[1] > compared[0], "the control: a size that was not warmed is compared"
