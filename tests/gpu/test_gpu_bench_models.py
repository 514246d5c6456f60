"""The benchmark of whole forwards and the profile, on two blocks of each family: every variant, graphs and floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from samebits.bench import chains, evidence, launches, models, profile, trace, variants
from samebits.bench.comparing import Bench
from samebits.bench.launches import Launches
from samebits.bench.models import Denoiser
from samebits.bench.profile import Subject
from samebits.bench.variants import Choice, Contest, Outcome
from samebits.ops import OPS

pytestmark = pytest.mark.gpu

BUILD: dict[str, Callable[[torch.device], Denoiser]] = {
    "qwen-image": partial(models.qwen_image, num_layers=2),
    "z-image": partial(models.z_image, n_layers=2, n_refiner_layers=1),
}
SIZE = 512


@pytest.fixture(params=BUILD)
def denoiser(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Denoiser]:
    yield models.at_size(BUILD[request.param](device), SIZE)
    variants.forget_compiled()
    torch.cuda.empty_cache()


GRAPHED = ("eager", "compile", "ours")
BESIDE = ("ours", "copies", "other")
"""Everything but matrix products and attention."""


def test_every_variant_of_a_forward(denoiser: Denoiser, device: torch.device) -> None:
    outcome = variants.measure(denoiser, Bench.on(device), OPS, SIZE, 1, Choice(rounds=2))
    rows = {row["variant"]: row for row in outcome.rows}
    print(*outcome.rows, *outcome.notes, sep="\n")
    assert list(rows) == list(evidence.VARIANTS)
    for row in outcome.rows:
        assert evidence.MODELS.problem(row) is None
        assert row["ms"] is not None, row
        assert row["launches"] > 0
        assert row["ms_gemm"] > 0
        assert row["ms_attention"] > 0
    for name in ("eager", "eager_graph", "ours", "ours_graph"):
        assert rows[name]["bits_equal"], name
    assert rows["ours"]["launches"] < rows["eager"]["launches"]
    for name in GRAPHED:
        # Memsets may go another way in a graph.
        assert rows[f"{name}_graph"]["launches"] == pytest.approx(rows[name]["launches"], rel=0.4), name
    assert rows["floor_graph"]["launches"] < rows["ours_graph"]["launches"]


@pytest.fixture
def accounts(denoiser: Denoiser, device: torch.device) -> dict[str, Launches]:
    """What each variant launched, by name, together with what the library's own kernels are called."""
    contest = Contest(denoiser, Bench.on(device), OPS, Outcome())
    try:
        contest.enter(Choice())
        contest.profile()
    finally:
        contest.switch.close()
    found = {name: lane.account for name, lane in contest.lanes.items() if lane.account is not None}
    assert list(found) == list(contest.lanes), contest.outcome.notes
    return found


def kernels_of(account: Launches) -> dict[str, int]:
    """Launches of kernels by class, without copies and memsets."""
    found = dict.fromkeys(launches.CLASSES, 0)
    for name, (count, _) in account.kernels.items():
        kind = launches.class_of(name, launches.kernels_of(OPS))
        found["copies" if "memset" in name.lower() else kind] += count
    del found["copies"]
    return found


PRODUCTS_LESS = {"qwen-image": 0, "z-image": 2}
"""How many matrix products less than eager a block makes with samebits: Z-Image's three of query, key and value are
one, Qwen-Image joins results alone. Each of these, of 128 rows and more here, is one launch."""


def feed_forwards_in_one(denoiser: Denoiser) -> int:
    """How many feed-forwards make their two first products in one launch: Z-Image's, but for those of the text, whose
    128 rows are too few. Qwen-Image's have one product there, alone or with its activation."""
    return len(denoiser.blocks) - len(denoiser.model.context_refiner) if denoiser.name == "z-image" else 0


def test_a_replay_launches_what_its_forward_launched(denoiser: Denoiser, accounts: dict[str, Launches]) -> None:
    """The profiler sees inside graphs: exactly the kernels of the forward, class by class."""
    counts = {name: kernels_of(account) for name, account in accounts.items()}
    print(*counts.items(), sep="\n")
    for name in GRAPHED:
        assert counts[f"{name}_graph"] == counts[name], name
    assert counts["ours"]["ours"] > 0
    assert counts["eager"]["ours"] == 0
    fewer = PRODUCTS_LESS[denoiser.name] * len(denoiser.blocks) + feed_forwards_in_one(denoiser)
    assert counts["ours"]["gemm"] == counts["eager"]["gemm"] - fewer
    assert counts["ours"]["attention"] == counts["eager"]["attention"]
    for kind in ("gemm", "attention"):
        assert counts["floor_graph"][kind] == counts["eager"][kind]


@pytest.mark.alone
def test_a_replay_spends_on_gemms_what_its_forward_spent(accounts: dict[str, Launches]) -> None:
    spent = {name: account.ms["gemm"] for name, account in accounts.items()}
    print(spent)
    for name in GRAPHED:
        assert spent[f"{name}_graph"] == pytest.approx(spent[name], rel=0.25), name
    assert spent["floor_graph"] == pytest.approx(spent["eager"], rel=0.25)
    beside = {name: sum(account.ms[kind] for kind in BESIDE) for name, account in accounts.items()}
    print(beside)
    assert beside["ours"] < beside["eager"]
    assert beside["floor_graph"] < 0.05 * spent["floor_graph"]


def test_two_pictures_at_once(device: torch.device) -> None:
    for name, build in BUILD.items():
        denoiser = models.at_size(build(device), SIZE, 2)
        outcome = variants.measure(denoiser, Bench.on(device), OPS, SIZE, 2, Choice((), rounds=1))
        assert all(row["ms"] is not None for row in outcome.rows), (name, outcome.rows, outcome.notes)


def test_a_profile_knows_operators_blocks_and_our_kernels(denoiser: Denoiser, device: torch.device) -> None:
    subject = Subject(denoiser.name, denoiser.model, denoiser.forward)
    found = profile.measure(subject, Bench.on(device), OPS, "here")
    assert found.bits_equal
    assert found.eager.counts["ours"] == 0
    assert found.ours.counts["ours"] > 0
    assert found.eager.counts["gemm"] > 0
    assert found.eager.counts["attention"] >= len(subject.blocks)
    assert found.calls.eager == 0, found.calls.reasons
    assert found.floor_ms is not None
    assert found.floor_ms > 0
    eager = trace.record(subject.forward, subject.blocks, cuda=True)
    assert {launch.block for launch in eager} >= set(subject.blocks), "the ranges around blocks are missing"
    known = [launch for launch in eager if launch.operator]
    assert len(known) > 0.95 * len(eager), "launches are not tied to the operators that made them"
    largest = chains.chains(eager)[0]
    assert "*" in largest.where
    assert len(largest.operators) > 1


@pytest.mark.alone
def test_a_forward_takes_longer_than_a_copy_of_its_sites_bytes(denoiser: Denoiser, device: torch.device) -> None:
    found = profile.measure(Subject(denoiser.name, denoiser.model, denoiser.forward), Bench.on(device), OPS, "here")
    assert found.floor_ms is not None
    assert 0 < found.floor_ms < sum(found.ours.ms.values())
