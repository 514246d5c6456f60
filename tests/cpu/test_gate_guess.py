"""Guesses at a signature hold for calls with the very same key and for no other, and end with the verdict."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gate_fakes import FakeKernel, FakeProbe, chain, fill_zeros, inputs, make_gate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits import guess
from samebits.bits import compare
from samebits.gate import Gate, Site, State
from samebits.guess import Guess, make_guess
from samebits.ops import OPS
from samebits.signature import Signature, signature_key
from samebits.site import GUESSES, LEARN_EVERY
from samebits.verdict import Entry


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def launcher(*args: Any, out: Any = None) -> Tensor:
    """Stands for a verified kernel."""
    return torch.zeros(1)


def guess_at(*args: Any) -> Guess | None:
    """A guess at the signature of ``args``, which is verified."""
    key = signature_key(args)
    assert key is not None
    entry = Entry(key, Signature.of((), args), State.VERIFIED, open=launcher)
    return make_guess(entry, args)


def test_this_torch_has_a_guard_that_tells_tensors_apart() -> None:
    assert guess.guards_hold()


X = torch.arange(24, dtype=torch.float32).reshape(4, 6)
Z = torch.arange(24).to(torch.complex64).reshape(4, 6)


def resized() -> Tensor:
    """A tensor whose memory was taken away, as sharding does."""
    tensor = X.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(rows: Sequence[Tensor] = (torch.ones(6), torch.ones(6))) -> Tensor:
    """A tensor without strides, for which torch's own guard ends the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # These are a prototype, says torch.
        return torch.nested.as_nested_tensor([*rows])


OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "dtype": lambda: (X.to(torch.bfloat16), Z, 0.5, None, "a"),
    "same width": lambda: (X.view(torch.int32), Z, 0.5, None, "a"),
    "shape": lambda: (X[:3].clone(), Z, 0.5, None, "a"),
    "dims": lambda: (X.view(1, 4, 6), Z, 0.5, None, "a"),
    "strides": lambda: (X.t().contiguous().t(), Z, 0.5, None, "a"),
    "expanded": lambda: (X[:, :1].expand(4, 6), Z, 0.5, None, "a"),
    "alignment": lambda: (torch.zeros(28)[1:25].view(4, 6), Z, 0.5, None, "a"),
    "no memory": lambda: (resized(), Z, 0.5, None, "a"),
    "device": lambda: (X.to("meta"), Z, 0.5, None, "a"),
    "negated": lambda: (torch._neg_view(X), Z, 0.5, None, "a"),
    "conjugated": lambda: (X, Z.conj(), 0.5, None, "a"),
    "subclass": lambda: (X.as_subclass(type("Wrapped", (Tensor,), {})), Z, 0.5, None, "a"),
    "functional": lambda: (torch._to_functional_tensor(X.clone()), Z, 0.5, None, "a"),
    "sparse": lambda: (X.to_sparse(), Z, 0.5, None, "a"),
    "swapped": lambda: (Z, X, 0.5, None, "a"),
    "scalar": lambda: (X, Z, 0.25, None, "a"),
    "scalar type": lambda: (X, Z, 1, None, "a"),
    "none": lambda: (X, Z, 0.5, False, "a"),
    "tensor for none": lambda: (X, Z, 0.5, X.clone(), "a"),
    "tensor for scalar": lambda: (X, Z, X.clone(), None, "a"),
    "sparse for scalar": lambda: (X, Z, X.to_sparse(), None, "a"),
    "array for none": lambda: (X, Z, 0.5, np.zeros(3), "a"),
    "array for tensor": lambda: (np.zeros((4, 6)), Z, 0.5, None, "a"),
    "nested": lambda: (nested(), Z, 0.5, None, "a"),
    "none for tensor": lambda: (None, Z, 0.5, None, "a"),
    "string": lambda: (X, Z, 0.5, None, "b"),
    "fewer": lambda: (X, Z, 0.5, None),
    "more": lambda: (X, Z, 0.5, None, "a", None),
}


@pytest.mark.parametrize("change", list(OTHERS))
def test_a_guess_does_not_hold_for_another_signature(change: str) -> None:
    held = guess_at(X, Z, 0.5, None, "a")
    assert held is not None
    other = OTHERS[change]()
    assert signature_key(other) != signature_key((X, Z, 0.5, None, "a"))
    assert held(other) is None
    assert held((X.clone(), Z.clone(), 0.5, None, "a")) is launcher


def test_a_guess_reads_tensors_anew_at_every_call() -> None:
    """Parameters are changed where they are: by ``.data``, ``set_``, ``resize_`` and moves between devices."""
    weight = nn.Parameter(torch.ones(4, 6))
    held = guess_at(X, weight)
    assert held is not None
    assert held((X, weight)) is launcher
    before = weight.data
    for data in (before.double(), before.t().contiguous().t(), torch.zeros(28)[1:25].view(4, 6), torch.ones(6, 4)):
        weight.data = data
        assert held((X, weight)) is None
        weight.data = before
        assert held((X, weight)) is launcher
    weight.data = before.clone()  # Other memory, the same signature.
    assert held((X, weight)) is launcher
    with torch.no_grad():
        weight.set_(torch.zeros(28)[2:26].view(4, 6))
        assert held((X, weight)) is None
        weight.set_(before)
        assert held((X, weight)) is launcher
    plain = X.clone()
    assert held((plain, weight)) is launcher
    plain.resize_(2, 6)
    assert held((plain, weight)) is None
    plain.resize_(4, 6)
    assert held((plain, weight)) is launcher


def test_the_determinism_flag_ends_a_guess() -> None:
    held = guess_at(X, 0.5)
    assert held is not None
    torch.use_deterministic_algorithms(True)
    try:
        assert held((X, 0.5)) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert held((X, 0.5)) is launcher


@pytest.mark.parametrize("scalar", [0.0, -0.0, math.nan])
def test_scalars_that_equal_others_are_not_guessed_at(scalar: float) -> None:
    assert guess_at(X, scalar) is None
    assert guess_at(X, 1e-6) is not None


def test_signatures_that_are_left_to_their_keys() -> None:
    assert guess_at(X, X) is None
    assert guess_at(torch.zeros(28)[1:25].view(4, 6)) is None
    assert guess_at(1.0, None) is None


SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3)
SCALARS = st.sampled_from([0.5, 1.0, 1, True, False, 0, None, "a", "b", 0.0, -0.0, math.nan, math.inf])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(SHAPES)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.complex64]))
    strides, stride = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = 0 if draw(st.integers(0, 5)) == 0 else stride
        stride *= shape[dim]
    tensor = torch.zeros(64, dtype=dtype).as_strided(shape, strides, draw(st.sampled_from([0, 0, 0, 4, 1])))
    if dtype.is_complex and draw(st.integers(0, 3)) == 0:
        tensor = tensor.conj()
    return nn.Parameter(tensor, requires_grad=False) if draw(st.integers(0, 3)) == 0 else tensor


CALLS = st.lists(st.one_of(tensors(), tensors(), SCALARS), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(calls=st.lists(CALLS, min_size=2, max_size=5))
def test_a_guess_never_holds_where_the_keys_differ(calls: list[tuple[Any, ...]]) -> None:
    for one, other in itertools.product(calls, repeat=2):
        if signature_key(one) is None:
            continue
        held = guess_at(*one)
        if held is not None:
            assert held(one) is launcher
            if held(other) is not None:
                assert signature_key(one) == signature_key(other)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_calls_of_every_op_are_guessed_at(op: Any) -> None:
    """A chain whose calls could not be guessed at would be slow for no reason that anybody sees."""
    cases = sorted(op.cases, key=lambda case: case.rows)[:12]
    calls = [case.build(torch.device("cpu"), seed) for case in cases for seed in (0, 1)]
    guessed = [(held, args) for args in calls if (held := guess_at(*args)) is not None]
    assert len(guessed) >= len(calls) // 2
    for held, args in guessed:
        for other in calls:
            assert (held(other) is launcher) <= (signature_key(args) == signature_key(other))


# Guesses at a site.


def bench(probe: FakeProbe | None = None) -> tuple[Gate, FakeKernel, Site]:
    gate, kernel = make_gate(probe=probe), FakeKernel()
    return gate, kernel, gate.site("s", kernel.op())


def counted_keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call that reads a key from now on."""
    read: list[Any] = []
    monkeypatch.setattr("samebits.site.signature_key", lambda args: read.append(args) or signature_key(args))
    return read


@pytest.mark.parametrize("other", ["nested", "tensor for scalar"])
def test_a_site_that_guesses_gives_other_arguments_to_the_reference(other: str) -> None:
    """Whatever stands where a guess expects something else, the caller gets what the reference makes of it."""
    _, kernel, site = bench()
    kernel.reference = lambda x, scale, eps, shift=None: x * eps
    kernel.fill = lambda args, outputs: outputs[0].copy_(args[0] * args[2])
    for seed in range(4):
        site(*inputs(seed=seed))
    assert site._guesses
    assert (site.counters.fused, site.counters.eager) == (3, 1)
    x, scale, eps = inputs()
    args = (nested(x.unbind()), scale, eps) if other == "nested" else (x, scale, x + 1)
    for one, expected in zip(site(*args).unbind(), (args[0] * args[2]).unbind(), strict=True):
        assert compare(one, expected) is None
    assert (site.counters.fused, site.counters.eager) == (3, 2)


def test_two_signatures_in_turns_are_both_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, site = bench()
    read = counted_keys(monkeypatch)
    for _ in range(10):
        for rows in (4, 5):
            args = inputs(rows)
            assert compare(site(*args), chain(*args)) is None
    assert len(read) == 4  # Compared once each, found by its key once each.
    assert (site.counters.fused, site.counters.eager) == (18, 2)


def test_more_signatures_than_guesses_are_answered_by_key_and_learnt_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, site = bench()
    made = []
    monkeypatch.setattr("samebits.site.make_guess", lambda *args: made.append(1) or make_guess(*args))
    for _ in range(50):
        for rows in range(1, 9):
            args = inputs(rows)
            assert compare(site(*args), chain(*args)) is None
    assert site.counters.fused == 49 * 8
    assert len(site._guesses) == GUESSES
    assert len(made) <= GUESSES + 49 * 8 // LEARN_EVERY


def test_a_signature_that_cannot_be_guessed_at_is_not_tried_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, site = bench()
    made = []
    monkeypatch.setattr("samebits.site.make_guess", lambda *args: made.append(1) and None)
    for _ in range(100):
        site(*inputs())
    assert len(made) == GUESSES + 1


@pytest.mark.parametrize("how", ["disable", "recheck", "launch fails"])
def test_a_guess_ends_with_the_verdict(how: str) -> None:
    gate, kernel, site = bench()
    args = inputs()
    for _ in range(4):
        site(*args)
    assert len(site._guesses) == 1
    assert site._guesses[0](args) is not None
    launches = kernel.verified_launches
    if how == "disable":
        gate.disable()
    elif how == "recheck":
        kernel.fill = fill_zeros
        gate.recheck()
    else:
        kernel.fill = lambda args, outputs: (_ for _ in ()).throw(ValueError("broken"))
        site(*args)
        launches += 1
        kernel.fill = fill_zeros
    assert site._guesses[0](args) is None
    for _ in range(2):
        assert compare(site(*args), chain(*args)) is None
    assert kernel.verified_launches == launches


def test_without_guards_every_call_is_found_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guess, "guards_hold", lambda: False)
    _, _, site = bench()
    read = counted_keys(monkeypatch)
    for _ in range(5):
        site(*inputs())
    assert (len(read), site.counters.fused, site._guesses) == (5, 4, ())


def test_a_guard_that_says_yes_too_often_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = guess._guard
    for spoilt in (lambda *tensors: True, lambda *tensors: False):
        monkeypatch.setattr(guess, "_guard", lambda tensors, spoilt=spoilt: spoilt)
        assert not guess._tells_apart()

    def blind(tensors: list[Tensor]) -> Callable[..., bool]:
        """A guard that looks at anything but the lazy negation."""
        check = real(tensors)
        return lambda *args: check(*(arg.resolve_neg() if type(arg) is Tensor else arg for arg in args))

    monkeypatch.setattr(guess, "_guard", blind)
    assert not guess._tells_apart()
    monkeypatch.setattr(guess, "_guard", real)
    assert guess._tells_apart()


def test_a_guard_that_raises_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(tensors: list[Tensor]) -> Callable[..., bool]:
        raise ImportError("no guards in this torch")

    monkeypatch.setattr(guess, "_guard", missing)
    guess.guards_hold.cache_clear()
    try:
        assert not guess.guards_hold()
    finally:
        guess.guards_hold.cache_clear()


def test_a_gate_may_be_told_not_to_guess() -> None:
    kernel = FakeKernel()
    site = Gate(unavailable=lambda device, host: None, guessing=False, made_up_elements=0).site("s", kernel.op())
    for _ in range(5):
        site(*inputs())
    assert (site.counters.fused, site._guesses) == (4, ())


def test_a_guess_keeps_no_tensor_alive() -> None:
    import gc
    import weakref

    _, kernel, site = bench()
    args = inputs()
    for _ in range(3):
        site(*args)
    assert site._guesses
    kept = [weakref.ref(arg) for arg in args[:2]]
    kernel.seen.clear()
    del args
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
