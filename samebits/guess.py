"""A guess at the signature of a call: that it is one which answered at this site before.

Reading twelve tensors' properties into a key takes longer than a verified call may. Nearly every call of a site is
like one before it, and that is settled in one step: torch's own guard of tensors, which its compiler holds against
every call of compiled code, compares types, dispatch keys (device kind, layout, lazy negation and conjugation, tensors
wrapped by a transform), dtypes, device numbers, shapes and strides without making a Python object of them. What it does
not know, addresses, scalars and the determinism flag, is compared here. A guess therefore holds for exactly the calls
whose key is the one it was made from, or for fewer; a call that no guess holds for is looked up by its key.

The guard is no public part of torch. Before the first guess it is tried on tensors that it must tell apart; where it
does not, or is not there, no guess is ever made. A leaf of the gate: it knows torch, signatures and verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from samebits.ops._op import Launcher
from samebits.signature import ALIGNMENT_BYTES
from samebits.verdict import Entry

Guess = Callable[[tuple[Any, ...]], Launcher | None]
"""Returns the verified kernel if the arguments are of the guessed signature and it may answer now, else ``None``."""

_deterministic = torch.are_deterministic_algorithms_enabled


def make_guess(entry: Entry, args: tuple[Any, ...]) -> Guess | None:
    """Return a guess that calls are of the signature of ``entry``, to which ``args`` belong.

    Returns
    -------
    Guess or None
        ``None`` where a call of this signature is better looked up by its key: its tensors are not aligned, or one
        is passed twice; a scalar equals others that are not the same (zeros, NaN); or torch has no such guard.
    """
    places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    others = [place for place in range(len(args)) if place not in places]
    tensors = [args[place] for place in places]
    if not places or len({id(tensor) for tensor in tensors}) < len(tensors) or not guards_hold():
        return None
    if any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in tensors):
        return None
    if any(type(args[place]) is float and not (args[place] > 0.0 or args[place] < 0.0) for place in others):
        return None
    holds, count = _guard(tensors), len(args)
    tensors_of, scalars_of = _picker(places), _picker(others)
    scalars = scalars_of(args)
    types = tuple(map(type, scalars))
    deterministic, alignment = entry.signature.deterministic, ALIGNMENT_BYTES - 1

    def guess(args: tuple[Any, ...]) -> Launcher | None:
        launcher = entry.open
        if launcher is None or len(args) != count or _deterministic() is not deterministic:
            return None
        tensors = tensors_of(args)
        try:
            for tensor in tensors:
                # The guard asks for strides outside of any handler, so one of these would end the process in it.
                if tensor.is_nested:
                    return None
        except Exception:
            return None  # Something else than a tensor, or a subclass that does not answer this.
        if not holds(*tensors):
            return None
        for tensor in tensors:
            address = tensor.data_ptr()
            if not address or address & alignment:
                return None
        given = scalars_of(args)
        # Types first: 1, 1.0 and True are equal, and a tensor or an array in a scalar's place has no truth to ask for.
        return launcher if tuple(map(type, given)) == types and given == scalars else None

    return guess


def _picker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the arguments at ``places`` out of a tuple, always as a tuple."""
    if not places:
        return lambda args: ()
    if places == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


def _guard(tensors: list[Tensor]) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    guards: Any = TensorGuards  # Its stub has other types than its code.
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@cache
def guards_hold() -> bool:
    """Say whether this torch has the guard of tensors, and it tells apart what signatures tell apart."""
    try:
        with torch.no_grad():
            return _tells_apart()
    except Exception:
        return False


def _tells_apart() -> bool:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    real, complex_ = zeros(4, 6), zeros(4, 6, dtype=torch.complex64)
    others: list[Any] = [
        real.double(),
        real.view(torch.int32),
        real[:3],
        real.view(1, 4, 6),
        real.view(6, 4),
        zeros(6, 4).t(),
        zeros(4, 12)[:, :6],
        zeros(4, 1).expand(4, 6),
        torch.empty(4, 6, device="meta"),
        torch._neg_view(real),
        real.to_sparse(),
        torch.nn.Parameter(real),
        torch._to_functional_tensor(zeros(4, 6)),
        complex_,
        None,
        1.0,
    ]
    holds, holds_complex, holds_both = _guard([real]), _guard([complex_]), _guard([real, complex_])
    # A guard that says no to everything would be of no use, and one that says yes to everything is found out below.
    other, other_complex = zeros(4, 6), zeros(4, 6, dtype=torch.complex64)
    alike = holds(other) and holds_complex(other_complex) and holds_both(other, other_complex)
    apart = not any(holds(other) for other in others) and not holds_complex(complex_.conj())
    return alike and apart and not any(holds_both(one, complex_) or holds_both(real, one) for one in others[:-3])
