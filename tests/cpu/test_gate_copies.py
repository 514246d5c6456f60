"""Sites in copied, pickled, forked and spawned models, and what a first call costs where no kernel can run."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from gate_fakes import FakeKernel, chain, inputs, make_gate, only
from torch import nn

from samebits import capture
from samebits.bits import compare
from samebits.gate import FORKED, Site, State, default_gate
from samebits.ops import by_name


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Block(nn.Module):
    """A module that holds a site as a patched one might."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.site = site

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.site(x, self.weight, 0.125)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_model_has_a_site_that_works_and_counts_for_itself(copied: Callable[[Block], Block]) -> None:
    gate, kernel = make_gate(), FakeKernel()
    block = Block(gate.site("block.0", kernel.op(), strict=True))
    x = inputs()[0]
    block(x)
    other = copy.deepcopy(block) if copied is copy.deepcopy else Block(copy.copy(block.site))
    assert compare(other(x), chain(x, block.weight.data, 0.125)) is None
    assert other.site is not block.site
    assert (other.site.counters.fused, block.site.counters.fused) == (1, 0)
    assert (other.site.name, other.site.strict, other.site.host) == ("block.0", True, False)
    assert gate.sites == (block.site, other.site)


def test_a_pickled_site_finds_its_op_and_the_gate_of_the_process() -> None:
    op = by_name("qk_norm")
    site = make_gate().site("block.0.attn", op, strict=True, host=True)
    found = pickle.loads(pickle.dumps(site))
    assert found.op is op
    assert (found.name, found.strict, found.host) == ("block.0.attn", True, True)
    assert found in default_gate().sites


def test_a_site_of_an_op_that_is_gone_says_so_when_it_is_unpickled() -> None:
    data = pickle.dumps(make_gate().site("s", FakeKernel().op("scale_add")))
    with pytest.raises(KeyError, match="no op is called 'scale_add'"):
        pickle.loads(data)


def test_the_default_gate_is_one() -> None:
    assert default_gate() is default_gate()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_child(body: Callable[[], None]) -> None:
    """Run ``body`` in a forked child and fail unless it returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_its_verdicts_and_is_not_stuck() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    known, fresh = inputs(2, 1), inputs(3, 1)
    site(*known)
    entry = next(iter(site._table.entries.values()))
    entry.busy = True  # As if another thread of the parent were comparing, which the child does not have.
    gate.recheck()

    def child() -> None:
        site(*known)
        site(*known)
        site(*fresh)
        site(*fresh)
        assert site.counters.fused == 2
        assert [verdict.verifications for verdict in gate.verdicts()] == [2, 1]

    with gate._ledger.lock:  # Held by a thread that does not exist in the child.
        in_child(child)
    assert site.counters.fused == 0


def test_a_child_forked_after_cuda_was_initialised_never_touches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, kernel = make_gate(), FakeKernel()
    site, args = gate.site("s", kernel.op()), inputs()
    site(*args)
    table = site._table
    (entry,) = table.entries.values()
    spec = entry.signature.args[0]
    object.__setattr__(spec, "device", torch.device("cuda:0"))
    object.__setattr__(entry.signature.args[1], "device", torch.device("cuda:0"))
    gate.pending[entry] = table
    monkeypatch.setattr(capture, "forked", lambda: True)
    gate.after_fork()
    assert (only(gate).state, only(gate).cause) == (State.UNSUPPORTED, FORKED)
    assert len(gate.pending) == 0
    launches = kernel.launches
    assert compare(site(*args), chain(*args)) is None
    assert (kernel.launches, site.counters.reasons[f"unsupported: {FORKED}"]) == (launches, 1)
    # A signature that is new in the child is not even asked about.
    entry.state = State.UNKNOWN
    assert gate._trials.claim(table, entry) == FORKED


def test_spawned_children_work_from_the_beginning() -> None:
    code = textwrap.dedent(
        """
        import pickle, sys, torch
        site = pickle.loads(bytes.fromhex(sys.argv[1]))
        with torch.no_grad():
            site(torch.ones(1, 2, 8), torch.zeros(1, 8), torch.zeros(1, 8), 1e-6)
        print(site.name, site.counters.fused, site.counters.eager)
        """
    )
    data = pickle.dumps(default_gate().site("norm_out", by_name("layer_norm_modulate")))
    found = subprocess.run(
        [sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == ["norm_out", "0", "1"]


def test_import_and_first_call_without_a_gpu_cost_little_and_warn_once() -> None:
    """Measured against torch, which a user has imported anyway."""
    code = textwrap.dedent(
        """
        import logging, time, torch
        torch.nn.functional.layer_norm(torch.ones(1, 8), (8,))
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("samebits").addHandler(handler)
        start = time.process_time()
        from samebits.gate import default_gate
        from samebits.ops import by_name
        site = default_gate().site("norm_out", by_name("layer_norm_modulate"))
        other = default_gate().site("norm", by_name("layer_norm_modulate"))
        args = (torch.ones(1, 2, 8), torch.zeros(1, 8), torch.zeros(1, 8), 1e-6)
        with torch.no_grad():
            site(*args), site(*args), other(args[0][:, :1], *args[1:])
        print(time.process_time() - start, len(records), torch.cuda.is_initialized(), *site.counters.reasons)
        """
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    seconds, warned, initialised, *reason = found.stdout.split()
    assert float(seconds) < 2.0
    assert (warned, initialised) == ("1", "False")
    assert reason[0] == "unsupported:"


def test_warnings_go_to_the_log_and_never_into_the_users_call(caplog: pytest.LogCaptureFixture) -> None:
    gate, kernel = make_gate(), FakeKernel()
    kernel.prepare_error = ValueError("a mistake of ours")
    with caplog.at_level(logging.WARNING, "samebits"):
        gate.site("s", kernel.op())(*inputs())
    (record,) = caplog.records
    assert record.getMessage() == (
        "samebits: op scale_add is eager for x: float32[4, 8] cpu, scale: float32[8] cpu, eps=0.125; "
        "failed: ValueError: a mistake of ours"
    )
