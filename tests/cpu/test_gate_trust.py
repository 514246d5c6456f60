"""Stored verdicts: what they save, how they are checked, and that no store lies or fails its way into a call."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, FakeStore, chain, fill_zeros, inputs, make_gate, only
from test_gate_watch import Clock
from torch import Tensor

from samebits.bits import compare
from samebits.certificate import CertificateStore, StoredVerdict
from samebits.errors import ContractViolation
from samebits.gate import AWAITED, COMPARED, HINTED, STORED, VOUCHED, Gate, Site, State, default_gate
from samebits.ops._op import Args
from samebits.signature import Signature, TensorSpec, signature_key
from samebits.trust import TRUSTS


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("samebits.verify.mark", clock.mark)
    return clock


def filled(*rows: int, state: str = "verified", cause: str = "") -> FakeStore:
    """A store that knows these signatures, as another process left it."""
    store = FakeStore()
    for count in rows:
        args = inputs(count)
        signature = Signature.of(("x", "scale", "eps", "shift"), args).canonical()
        store.put(StoredVerdict("scale_add", FakeKernel().op().source_hash, signature, state, cause))  # type: ignore[arg-type]
    store.puts = 0
    return store


def bench(store: FakeStore, trust: str = "hint", **options: Any) -> tuple[Gate, FakeKernel, Site]:
    gate, kernel = make_gate(store=store, trust=trust, **options), FakeKernel()
    return gate, kernel, gate.site("s", kernel.op())


def call(site: Site, rows: int = 4) -> Tensor:
    """One call, whose result must be eager's."""
    args = inputs(rows)
    result = site(*args)
    assert compare(result, chain(*args)) is None
    return result


# The text of a signature.


def test_the_canonical_text_says_everything_and_no_address() -> None:
    base = torch.zeros(2, 12, dtype=torch.bfloat16)
    args = (torch.zeros(1, 3, 4), base[:, 4:8], None, 1e-6, "diffusers", True, 5)
    text = Signature.of(("x",), args).canonical()
    assert json.loads(text) == [
        1,
        False,
        ["float32", [1, 3, 4], [12, 4, 1], 0, "cpu"],
        ["bfloat16", [2, 4], [12, 1], 8, "cpu"],
        {"NoneType": None},
        {"float": (1e-6).hex()},
        {"str": "diffusers"},
        {"bool": True},
        {"int": 5},
    ]
    other = (torch.ones(1, 3, 4), base.clone()[:, 4:8], *args[2:])
    assert Signature.of((), other).canonical() == text


def test_two_calls_have_one_text_exactly_where_they_have_one_key() -> None:
    x = torch.zeros(4, 6)
    calls: list[Args] = [
        (x, scalar) for scalar in (1, 1.0, True, 0, 0.0, -0.0, False, None, "1", "", float("nan"), float("inf"))
    ]
    calls += [(view,) for view in (x, x[:3], x.t(), x[:, ::2], x.double(), torch.zeros(25)[1:].view(4, 6))]
    calls += [(x, x), (x, None), (x, "None"), (x, 'a","b'), (x, "a", "b"), (x, "\ud800"), (x, "1.0"), ("x", x)]
    by_text: dict[str, Any] = {}
    for args in calls:
        by_text.setdefault(Signature.of((), args).canonical(), set()).add(signature_key(args))
    assert all(len(keys) == 1 for keys in by_text.values())
    assert len(by_text) == len({signature_key(args) for args in calls})
    torch.use_deterministic_algorithms(True)
    try:
        assert Signature.of((), calls[0]).canonical() not in by_text
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_text_names_the_gpu_and_not_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    texts = set()
    for number in (0, 1):
        spec = TensorSpec(torch.float32, (3,), (1,), torch.device("cuda", number), 0)
        texts.add(Signature(("x",), (spec,)).canonical())
    (text,) = texts
    assert json.loads(text)[2][4] == "cuda NVIDIA H200 9.0 132 multiprocessors"
    Properties.multi_processor_count = 78
    assert Signature(("x",), (spec,)).canonical() != text


def test_the_text_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from samebits.signature import Signature; "
        "print(Signature.of(('x',), (torch.zeros(3, 4)[:, 1:], 1e-5, 'native')).canonical())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == Signature.of((), (torch.zeros(3, 4)[:, 1:], 1e-5, "native")).canonical()


# What is kept.


def test_every_verdict_is_kept_with_what_it_rests_on() -> None:
    store = FakeStore()
    gate, kernel, site = bench(store, made_up_elements=40)
    call(site)
    kernel.fill = fill_zeros
    call(site, 3)
    kernel.prepare_error = ValueError("broken")
    call(site, 2)
    kernel.reason = lambda *args: "not today"
    call(site, 1)
    verified, refused = store.known.values()
    assert (verified.op, verified.source, verified.state) == ("scale_add", kernel.op().source_hash, "verified")
    assert (verified.elements, verified.basis, verified.cause) == (32 + 64, "a call", "")
    assert verified.signature == Signature.of((), inputs()).canonical()
    assert refused.state == "refused"
    assert "24 of 24 elements differ" in refused.cause
    assert store.puts == 2
    gate.flush()
    assert store.flushes == 1


def test_a_revocation_is_kept_too() -> None:
    store = FakeStore()
    gate, kernel, site = bench(store, recheck_every=1)
    call(site)
    kernel.fill = fill_zeros
    call(site)
    (kept,) = store.known.values()
    assert (kept.state, kept.cause.startswith("revoked by a re-check at s")) == ("refused", True)
    kernel.fill = fill_zeros
    gate.recheck()
    assert store.puts == 2


def test_a_store_that_comes_later_is_told_what_is_known() -> None:
    gate, _, site = bench(FakeStore())
    gate.use(None)
    call(site)
    store = FakeStore()
    gate.use(store, "anew")
    assert [verdict.state for verdict in store.known.values()] == ["verified"]


def test_kernels_for_the_cpu_are_neither_asked_about_nor_kept() -> None:
    store = filled(4)
    gate, kernel = make_gate(store=store), FakeKernel()
    site = gate.site("s", kernel.op(), host=True)
    for _ in range(3):
        call(site)
    assert (store.gets, store.puts) == (0, 0)
    assert only(gate).verifications == 3


def test_what_no_kernel_takes_is_not_asked_about() -> None:
    store = filled(4)
    _, kernel, site = bench(store)
    kernel.reason = lambda *args: "not today"
    call(site)
    assert store.gets == 0


# A hint.


def test_a_hint_saves_the_made_up_inputs_and_the_waiting(clock: Clock) -> None:
    gate, kernel, site = bench(filled(4), made_up_elements=1 << 10)
    clock.done = False
    made: list[Tensor] = []
    kernel.reference = lambda *args: made.append(chain(*args)) or made[-1]
    assert call(site) is made[0]  # Eager's own.
    assert (kernel.prepared, kernel.launches, kernel.references) == (1, 1, 1)
    for _ in range(3):
        call(site)  # Eager until the answer is read.
    assert (kernel.launches, kernel.references) == (1, 4)
    assert dict(site.counters.reasons) == {HINTED: 1, AWAITED: 3}
    clock.done = True
    call(site)
    assert (kernel.verified_launches, site.counters.fused) == (1, 1)
    assert (only(gate).state, only(gate).basis, only(gate).verifications) == (State.VERIFIED, VOUCHED, 1)
    assert (site.counters.rechecked, site.counters.differed) == (0, 0)


def test_without_a_hint_the_same_call_takes_the_long_way() -> None:
    """The control."""
    _, kernel, site = bench(filled(), made_up_elements=1 << 10)
    call(site)
    assert kernel.launches > 2
    assert dict(site.counters.reasons) == {COMPARED: 1}


def test_a_hint_that_is_wrong_never_changes_a_bit(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(4)
    gate, kernel, site = bench(store)
    kernel.fill = fill_zeros
    clock.done = False
    for _ in range(3):
        call(site)
    clock.done = True
    with caplog.at_level(logging.WARNING, "samebits"):
        for _ in range(3):
            call(site)
    assert (only(gate).state, only(gate).revoked, kernel.verified_launches) == (State.REFUSED, False, 0)
    assert only(gate).cause.endswith("although a stored verdict says verified")
    assert [kept.state for kept in store.known.values()] == ["refused"]
    assert len(caplog.records) == 1


def test_a_stored_refusal_is_only_a_hint_too() -> None:
    gate, _, site = bench(filled(4, state="refused", cause="of old"))
    call(site)
    call(site)
    assert (only(gate).state, site.counters.fused, dict(site.counters.reasons)) == (State.VERIFIED, 1, {COMPARED: 1})


def test_a_recheck_that_is_asked_for_while_a_hint_is_confirmed_is_not_lost(clock: Clock) -> None:
    gate, kernel, site = bench(filled(4))
    clock.done = False
    call(site)
    kernel.fill = fill_zeros
    assert gate.recheck() == 1
    clock.done = True
    call(site)
    call(site)
    assert (only(gate).state, only(gate).verifications) == (State.REFUSED, 2)


@pytest.mark.parametrize("where", ["capturing_here", "capturing_elsewhere"])
@pytest.mark.parametrize("trust", ["hint", "stored"])
def test_during_a_capture_nobody_is_asked(where: str, trust: str) -> None:
    probe, store = FakeProbe(), filled(4, 5)
    gate, kernel, site = bench(store, trust, probe=probe)
    setattr(probe, where, True)
    call(site)
    assert (kernel.prepared, store.gets, len(gate.pending)) == (0, 0, 1)
    setattr(probe, where, False)
    call(site, 5)
    verdict = gate.verdicts()[0]
    assert verdict.state is State.VERIFIED
    assert verdict.basis == (STORED if trust == "stored" else "made-up inputs")
    setattr(probe, where, True)
    fused = site.counters.fused
    call(site)
    assert site.counters.fused == fused + 1


@pytest.mark.parametrize("step", ["prepare", "launch", "no memory", "read"])
def test_trouble_while_a_hint_is_confirmed(step: str, clock: Clock) -> None:
    gate, kernel, site = bench(filled(4))

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room") if step == "no memory" else ValueError("broken")

    if step == "prepare":
        kernel.prepare_error = ValueError("broken")
    elif step == "read":
        clock.done = False
        call(site)
        gate._awaited.outstanding[0].observation.arrived = fail  # type: ignore[assignment]
    else:
        kernel.fill = fail
    for _ in range(2):
        call(site)
    (entry,) = site._table.entries.values()
    assert (entry.busy, entry.watched, entry.vouched) == (False, 0, False)
    kernel.fill, kernel.prepare_error, clock.done = FakeKernel().fill, None, True
    for _ in range(4):
        call(site)
    failed = step in ("prepare", "launch")
    assert only(gate).state is (State.FAILED if failed else State.VERIFIED)
    assert (site.counters.fused > 0) is not failed


# Believed.


def test_what_is_stored_is_believed_without_a_comparison() -> None:
    store = filled(4)
    gate, kernel, site = bench(store, "stored")
    call(site)
    call(site)
    assert (kernel.references, kernel.launches, kernel.verified_launches) == (0, 2, 2)
    assert (site.counters.fused, site.counters.eager) == (2, 0)
    verdict = only(gate)
    assert (verdict.state, verdict.basis, verdict.verifications) == (State.VERIFIED, STORED, 0)
    assert store.puts == 0
    call(site, 5)  # Not stored: compared, and kept.
    assert store.puts == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_that_is_believed(strict: bool) -> None:
    _, kernel, site = bench(filled(4, state="refused", cause="1 of 3 elements differ"), "stored", strict=strict)
    if strict:
        with pytest.raises(ContractViolation, match="by a stored verdict: 1 of 3 elements differ"):
            site(*inputs())
        return
    for _ in range(2):
        call(site)
    assert dict(site.counters.reasons) == {"refused: by a stored verdict: 1 of 3 elements differ": 2}
    assert (kernel.launches, kernel.prepared) == (0, 0)


def test_the_watch_finds_a_lie_that_was_believed() -> None:
    store = filled(4)
    gate, kernel, site = bench(store, "stored", recheck_every=1)
    kernel.fill = fill_zeros
    site(*inputs())  # This is what "stored" means.
    for _ in range(3):
        call(site)
    assert (only(gate).state, only(gate).revoked) == (State.REFUSED, True)
    assert [kept.state for kept in store.known.values()] == ["refused"]


def test_a_kernel_that_does_not_build_is_no_matter_of_the_store() -> None:
    gate, kernel, site = bench(filled(4), "stored")
    kernel.prepare_error = ValueError("a mistake of ours")
    for _ in range(2):
        call(site)
    assert only(gate).state is State.FAILED


def test_verified_anew_means_that_nobody_is_asked() -> None:
    store = filled(4)
    _, _, site = bench(store, "anew")
    call(site)
    assert (store.gets, store.puts, dict(site.counters.reasons)) == (0, 1, {COMPARED: 1})


# A store that fails or lies.


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("method", ["get", "put", "flush"])
def test_a_store_that_raises_is_asked_no_more(method: str, trust: str, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(4)
    gate, _, site = bench(store, trust, strict=True)
    broken = []

    def fail(*args: Any) -> Any:
        broken.append(args)
        raise OSError("the disk is gone\nand more")

    setattr(store, method, fail)
    with caplog.at_level(logging.WARNING, "samebits"):
        for rows in (4, 4, 5, 5, 6, 6):
            call(site, rows)
        gate.flush()
        gate.flush()
    asked = not (method == "get" and trust == "anew")
    assert len(broken) == int(asked)
    assert [record.getMessage() for record in caplog.records] == [
        "samebits: stored verdicts are neither asked for nor kept from now on: OSError: the disk is gone"
    ] * int(asked)
    assert site.counters.fused >= 3


class Anything:
    """Says yes to everything that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return Anything()


@pytest.mark.parametrize("trust", ["hint", "stored"])
@pytest.mark.parametrize("lie", ["other op", "other source", "other signature", "other state", "number", "dict", "any"])
def test_what_does_not_fit_the_question_is_no_answer(lie: str, trust: str) -> None:
    store = FakeStore()
    gate, kernel, site = bench(store, trust)

    def get(op: str, source: str, signature: str) -> Any:
        right = {"op": op, "source": source, "signature": signature, "state": "verified", "cause": ""}
        key = lie.removeprefix("other ")
        if key in right:
            return StoredVerdict(**(right | {key: "unknown" if key == "state" else "something else"}))
        return {"number": 7, "dict": right, "any": Anything()}[lie]

    store.get = get  # type: ignore[method-assign]
    kernel.fill = fill_zeros
    for _ in range(3):
        call(site)
    assert only(gate).state is State.REFUSED
    assert kernel.verified_launches == 0


def test_an_unknown_trust_is_refused() -> None:
    with pytest.raises(ValueError, match="trust must be one of hint, stored, anew, got 'blindly'"):
        make_gate(store=FakeStore(), trust="blindly")
    gate = make_gate()
    with pytest.raises(ValueError, match="trust must be"):
        gate.use(FakeStore(), "")


# With the real store.


def run_once(folder: Path, fill: Any = None, trust: str = "hint") -> tuple[Gate, FakeKernel, Site]:
    """What one process does: three calls of two signatures each, and an orderly end."""
    store = CertificateStore(folder, {"gpu": "none", "torch": torch.__version__})
    gate, kernel = make_gate(store=store, trust=trust, made_up_elements=64), FakeKernel()
    kernel.fill = fill or kernel.fill
    site = gate.site("s", kernel.op())
    for _ in range(3):
        for rows in (4, 5):
            call(site, rows)
    gate.flush()
    return gate, kernel, site


def test_a_verdict_outlives_its_process(tmp_path: Path) -> None:
    _, first, site = run_once(tmp_path)
    assert dict(site.counters.reasons) == {COMPARED: 2}
    gate, second, site = run_once(tmp_path)
    assert dict(site.counters.reasons) == {HINTED: 2}
    assert {verdict.basis for verdict in gate.verdicts()} == {VOUCHED}
    assert second.references == 2 < first.references
    _, third, site = run_once(tmp_path, trust="stored")
    assert (third.references, site.counters.fused, site.counters.eager) == (0, 6, 0)


def test_a_kernel_that_turned_wrong_is_refused_and_that_is_kept(tmp_path: Path) -> None:
    run_once(tmp_path)
    gate, _, _ = run_once(tmp_path, fill_zeros)
    assert {verdict.state for verdict in gate.verdicts()} == {State.REFUSED}
    gate, kernel, _ = run_once(tmp_path, fill_zeros, "stored")
    assert {verdict.basis for verdict in gate.verdicts()} == {STORED}
    assert kernel.launches == 0


def test_a_spoilt_file_means_verified_anew(tmp_path: Path) -> None:
    run_once(tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(file.read_bytes()[:-20])
    _, _, site = run_once(tmp_path, trust="stored")
    assert dict(site.counters.reasons) == {COMPARED: 2}


def test_the_gate_of_the_process_follows_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    for value, trust in (("off", None), ("", "hint"), ("stored", "stored")):
        monkeypatch.setattr("samebits.gate._default", None)
        monkeypatch.setenv("SAMEBITS_CERTIFICATES", value)
        found = default_gate()._ledger.trust
        assert (None if found is None else found.trust) == trust
        if found is not None:
            assert found.store.folder == tmp_path / "certificates"  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())  # Nothing is written before there is something to keep.
