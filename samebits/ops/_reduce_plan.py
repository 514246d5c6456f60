"""How ATen sums a row: a mirror of ``setReduceConfig`` in ``Reduce.cuh``, the tree that follows, and a check that it
is so.

The order of a sum follows from a geometry, and the geometry from the number of rows, the row's length and the element
size, so a kernel that wants ATen's bits must ask here before it compiles.

Read in the headers of torch 2.13 and 2.14 (``torch/include/ATen/native/cuda/Reduce.cuh``). They differ only in how many
blocks may share one row, which no kernel here stands for. torch 2.9 and earlier had other rules (:data:`OLDER`); no
kernel has their order, they are here so that it is known when it is met.

On a version of torch and an architecture for which the trees were recovered from a GPU (:data:`RECORDED`) the plan is
taken as it is. On any other the first use of a geometry asks the GPU (:func:`why_no_plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from samebits import capture, summation
from samebits.summation import Builder, Probe, Tree

_MAX_THREADS = 512
_WARP = 32
_LAYER_NORM_THREADS, _LAYER_NORM_VECTOR = 128, 4

RECORDED = frozenset({("2.11.0", 9)})
"""Versions of torch, with the major compute capability, on which `samebits prove` found eager's trees to be those
planned."""

SAMPLED_ADDITIONS = 512
"""About how many additions of a row, at most, an unrecorded version is asked. Every size of addition is among them."""


@dataclass(frozen=True)
class Rules:
    """What differs between versions of ATen."""

    name: str
    vectorised_from: int
    """Elements of the shortest row that is loaded in vectors."""
    half_vector: int
    """Elements in a vector of 16-bit elements."""
    halves: bool
    """Whether lanes fold by offsets 16, 8, 4, 2, 1, or else by 1, 2, 4, 8, 16."""


CURRENT = Rules("torch 2.10 and later", vectorised_from=128, half_vector=8, halves=True)
OLDER = Rules("torch 2.9 and earlier", vectorised_from=129, half_vector=4, halves=False)


def rules_of(version: str) -> Rules:
    """Return the rules of a version of torch, such as ``2.11.0+cu130``."""
    return CURRENT if _release(version) >= (2, 10) else OLDER


@dataclass(frozen=True)
class ReducePlan:
    """The geometry of one contiguous row reduction.

    Attributes
    ----------
    columns : int
        Threads along the row (``block_width``).
    groups : int
        Groups of ``columns`` threads that share a row (``block_height`` where the input is split across warps, else 1).
    vector : int
        Consecutive elements a thread loads at once; 1 means ATen keeps four strided accumulators instead.
    """

    columns: int
    groups: int
    vector: int

    @property
    def block(self) -> tuple[int, int, int]:
        """The block in which ``_row_sum.cuh`` sums one row."""
        return (128, 1, 1) if self.columns * self.groups == 32 else (self.columns, self.groups, 1)


def _last_power_of_two(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def reduce_plan(rows: int, width: int, element_size: int, rules: Rules = CURRENT) -> ReducePlan | None:
    """Return the geometry in which ATen sums ``rows`` contiguous rows of ``width`` elements.

    Parameters
    ----------
    rows : int
        Number of sums, that is, of output elements.
    width : int
        Elements in a row.
    element_size : int
        Bytes of one element as the reduction reads it: 4 for fp32, 2 for fp16 and bf16.
    rules : Rules
        Which versions of ATen. Kernels have the order of the current ones.

    Returns
    -------
    ReducePlan or None
        ``None`` where ATen splits a row across blocks: that order depends on the number of multiprocessors.
    """
    vector = (rules.half_vector if element_size == 2 else 4) if width >= rules.vectorised_from else 1
    length = width // vector
    length_pow2 = min(_last_power_of_two(length), _MAX_THREADS)
    rows_pow2 = min(_last_power_of_two(rows), _MAX_THREADS)
    columns = min(length_pow2, _WARP)
    height = min(rows_pow2, _MAX_THREADS // columns)
    columns = min(length_pow2, _MAX_THREADS // height)

    values_per_thread = -(-width // columns)
    if values_per_thread < min(height * 16, 256):
        return ReducePlan(columns, 1, vector)
    if -(-width // (columns * height)) >= 256:
        return None
    return ReducePlan(columns, height, vector)


def reduce_tree(plan: ReducePlan, width: int, *, shift: int = 0, rules: Rules = CURRENT) -> Tree:
    """Return the order in which ATen adds the elements of a row, written down from the plan.

    Parameters
    ----------
    plan : ReducePlan
    width : int
    shift : int
        By how many elements the row starts after a multiple of its vector's bytes.
    rules : Rules
    """
    builder = Builder(width)
    threads = plan.columns * plan.groups
    # What each thread adds to each of its accumulators, in order.
    own: list[list[list[int | None]]] = [[[] for _ in range(max(plan.vector, 4))] for _ in range(threads)]
    if plan.vector == 1:
        for at in range(width):
            own[at % threads][at // threads % 4].append(at)
    else:
        head = (plan.vector - shift) % plan.vector  # unaligned elements; thread `shift` takes the first of them
        for at in range(head):
            own[shift + at][0].append(at)
        vectors = (width - head) // plan.vector
        for at in range(vectors):
            for lane in range(plan.vector):
                own[at % threads][lane].append(head + at * plan.vector + lane)
        for thread, at in enumerate(range(head + vectors * plan.vector, width)):
            own[thread][0].append(at)
    sums = [builder.serial([builder.serial(accumulator) for accumulator in thread]) for thread in own]
    groups: list[int | None] = []
    for first in range(0, threads, plan.columns):
        warp = builder.halves(sums[first : first + plan.columns], min(plan.columns, _WARP))
        groups.append(builder.halves(warp)[0] if rules.halves else builder.neighbours(warp))
    builder.halves(groups)
    return builder.tree()


def layer_norm_tree(width: int) -> Tree:
    """Return the order in which ``F.rms_norm`` adds the squares of a row of ``width`` elements, a multiple of four.

    It is ``vectorized_layer_norm_kernel`` without the mean: 128 threads, each adds up its 4-vectors element by
    element; lanes fold by halves, then the four warps do.
    """
    builder = Builder(width)
    own: list[list[int | None]] = [[] for _ in range(_LAYER_NORM_THREADS)]
    for at in range(width):
        own[at // _LAYER_NORM_VECTOR % _LAYER_NORM_THREADS].append(at)
    sums = [builder.serial(thread) for thread in own]
    warps = [builder.halves(sums[first : first + _WARP])[0] for first in range(0, _LAYER_NORM_THREADS, _WARP)]
    builder.halves(warps)
    return builder.tree()


# --- versions that were never recorded --------------------------------------------------------------------------------

_Question = Callable[[int, int, torch.dtype, torch.device], str | None]
_found: dict[tuple[_Question, int, int, int, torch.dtype], str | None] = {}


def why_no_plan(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why no kernel has the order in which eager's ``mean(-1)`` sums here, or return ``None``.

    Where the version of torch or the architecture is not in :data:`RECORDED`, eager is asked on the device, once per
    process and geometry: some six hundred means at most, a few milliseconds to some tens of them.

    Parameters
    ----------
    rows, width : int
        The sums and the elements of each.
    dtype : torch.dtype
        Of the elements as the reduction reads them.
    device : torch.device
        On a CPU nothing is asked: ATen's sums there have orders of their own, and no kernel answers unchecked.
    """
    if reduce_plan(rows, width, dtype.itemsize) is None:
        return "the rows are so long that ATen splits one across blocks"
    # More rows than ATen's largest block has threads change nothing.
    return _asked_once(probe_mean, min(_last_power_of_two(rows), _MAX_THREADS), width, dtype, device)


def why_no_rms_norm_plan(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Like :func:`why_no_plan`, for ``F.rms_norm`` over ``width`` elements, whose order does not depend on the rows."""
    return _asked_once(probe_rms_norm, 64, width, dtype, device)


def _asked_once(ask: _Question, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda" or _recorded(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (ask, index, rows, width, dtype)
    if key not in _found:
        captures = capture.default_probe()
        if captures.here(device) or captures.anywhere():
            return "eager's order of summation was never recorded for this torch, and a graph is being captured now"
        with torch.no_grad():
            _found[key] = ask(rows, width, dtype, torch.device("cuda", index))
    return _found[key]


def probe_mean(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Ask eager's ``mean(-1)`` for its order, whatever is recorded. See :func:`why_no_plan`; works on any device."""
    probe = Probe(mean, width, rows, dtype, device)
    wrong = _misfit(probe, CURRENT)
    if wrong is None:
        return None
    what = f"torch {torch.__version__} sums {rows} rows of {width} {str(dtype).removeprefix('torch.')} elements"
    if _misfit(probe, OLDER) is None:
        return f"{what} in the order of {OLDER.name}, which no kernel has"
    return f"{what} in an order that no kernel has: {wrong}"


def probe_rms_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Ask eager's ``F.rms_norm`` for its order. See :func:`why_no_rms_norm_plan`; only on a GPU there is one to ask."""
    probe = summation.tell_squares(Probe(reciprocal_root, width, rows, dtype, device))
    if probe is None:
        wrong: str | None = "its results do not tell one order from another"
    else:
        wrong = summation.confirm(probe, layer_norm_tree(width), summation.ask_squares)
    return wrong and f"torch {torch.__version__} sums F.rms_norm over {width} elements in an unknown order: {wrong}"


def mean(x: torch.Tensor) -> torch.Tensor:
    """Return eager's mean of each row."""
    return x.mean(-1)


def reciprocal_root(x: torch.Tensor) -> torch.Tensor:
    """Return ``rsqrt(mean(x * x))`` in fp32, a number a row, from the kernel behind ``F.rms_norm``."""
    root: torch.Tensor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], None, 0.0)[1]
    return root


def _misfit(probe: Probe, rules: Rules) -> str | None:
    plan = reduce_plan(probe.rows, probe.leaves, probe.dtype.itemsize, rules)
    if plan is None:
        return "a row may be split across blocks"
    tree = reduce_tree(plan, probe.leaves, rules=rules)
    return summation.confirm(probe, tree, summation.ask_signed, SAMPLED_ADDITIONS)


def _recorded(device: torch.device) -> bool:
    return (torch.__version__.partition("+")[0], torch.cuda.get_device_capability(device)[0]) in RECORDED


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
