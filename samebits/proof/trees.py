"""Summation trees of eager and of the kernels, compared addition by addition; LayerNorm's moments, step by step.

What an op sums follows from its sources: ``_row_sum.cuh`` stands for ``mean(-1)`` over full rows, ``_head_norm.cuh``
for the means over heads and for ``F.rms_norm``, ``_layer_norm.cuh`` for LayerNorm. The tree that the planner writes
down for a geometry is what a kernel is compiled for; here eager's own tree is found on the device, then the kernel's,
and both must be that tree. How: :mod:`samebits.summation`; what it shows: docs/trees.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from samebits.ops import _reduce_plan as planner
from samebits.ops._op import Op
from samebits.ops._reduce_plan import OLDER, ReducePlan, layer_norm_tree, reduce_plan, reduce_tree
from samebits.proof import welford
from samebits.proof.tree_kernels import HEAD_NORM, KINDS, LAYER_NORM, ROW_SUM, SumKernels
from samebits.proof.tree_pictures import picture
from samebits.proof.workshop import Change
from samebits.summation import Probe, Tree, ask_signed, ask_squares, confirm, recover

ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 4096)
WIDTHS = (128, 132, 256, 1000, 2560, 3072, 3584, 3840, 5120, 8192, 8200, 12288, 16384)
QUICK_WIDTHS = (128, 256, 3072, 3840, 8200)
HEADS = (32, 40, 64, 72, 120, 128, 136, 248, 256)
QUICK_HEADS = (64, 72, 128, 256)
MOMENT_WIDTHS = (4, 128, 516, 1000, 3072, 3840, 3844, 8192, 16384)
QUICK_MOMENT_WIDTHS = (128, 1000, 3072)
UNALIGNED_WIDTHS = (128, 3840)
WIDEST = 16384
PICTURED = (128, 256, 3072, 3840, 8192)
"""Widths whose trees are drawn."""

EPS = 1e-6
BLIND_CALLS, QUICK_BLIND_CALLS = 20_000, 2_000
"""Eager's tree is recovered blindly where that takes no more calls than so many, else confirmed."""
KERNEL_ROWS = 1024
"""Rows in a launch of a kernel that only sums: its order is compiled in."""
HOST_ROWS = 256

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = (BF16, FP16)
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tasks are done, and how many there are."""

RECOVERED = "recovered blindly (FPRev) and compared with the planned tree"
CONFIRMED = "one triple of leaves for each addition of the planned tree, which no other tree answers alike"
STEP_BY_STEP = "a step-by-step emulator of ATen's kernel on random and adversarial rows; sampled, since it is no sum"


@dataclass(frozen=True)
class Finding:
    """What one geometry's probe came to."""

    header: str
    side: str
    """``eager`` or ``kernel``."""
    what: str
    """What is summed, such as ``mean`` or ``F.rms_norm``."""
    dtype: torch.dtype
    rows: int
    width: int
    offset: int
    method: str
    tree: str
    """The planned tree's digest."""
    additions: int
    wrong: str | None
    """Where the tree is another one, or ``None``."""

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"dtype": _name(self.dtype)}


@dataclass
class TreeProof:
    """What was found about every order of summation.

    Attributes
    ----------
    rows : list of dict
        Record rows: ``op, dtype, step, domain, checked, differ, method``; ``first`` where something differs, ``error``
        where something could not be run. Trees are counted, for LayerNorm rows.
    findings : list of Finding
        One for each geometry.
    pictures : list of (str, str)
        Title and SVG of each distinct tree of the widths in :data:`PICTURED`.
    controls : list of (str, bool)
        Deliberately wrong kernels and plans, and whether each was caught.
    notes : list of str
        What is shown and not claimed.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    controls: list[tuple[str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Geometry:
    """Rows of a width that are reduced at once, as the reduction reads them."""

    rows: int
    width: int
    dtype: torch.dtype = FP32
    offset: int = 0

    @property
    def plan(self) -> ReducePlan:
        """ATen's plan."""
        plan = reduce_plan(self.rows, self.width, self.dtype.itemsize)
        if plan is None:
            raise ValueError(f"{self.rows} rows of {self.width} may be split across blocks; expected fewer elements")
        return plan

    @property
    def tree(self) -> Tree:
        """The tree that the plan gives."""
        return _planned(self.plan, self.width, self.offset)


@cache
def _planned(plan: ReducePlan, width: int, offset: int) -> Tree:
    return reduce_tree(plan, width, shift=offset)


@cache
def _layer_norm_planned(width: int) -> Tree:
    return layer_norm_tree(width)


def thresholds(least: int, most: int = WIDEST) -> list[Geometry]:
    """Both sides of every width at which the plan of some number of rows changes, in steps of four elements."""
    found = []
    for rows in ROWS:
        for width in range(max(8, least), most + 1, 4):
            sides = [Geometry(rows, width - 4), Geometry(rows, width)]
            if sides[0].plan != sides[1].plan:
                found += sides
    return found


def prove_trees(
    ops: Sequence[Op],
    device: torch.device,
    quick: bool = False,
    progress: Progress = lambda text, done, total: None,
) -> TreeProof:
    """Find the order of every sum that ``ops`` stand for, on both sides, and compare.

    Parameters
    ----------
    ops : sequence of Op
    device : torch.device
        On the CPU the kernels run behind the shim and are held against the planned trees; torch's own CPU sums have
        other trees, which are drawn and not claimed.
    quick : bool
        Fewer widths, and eager's trees confirmed rather than recovered where that takes long.
    progress : callable
    """
    proof = TreeProof()
    with torch.no_grad(), SumKernels(device) as kernels:
        tasks = list(_tasks(proof, ops, device, quick, kernels))
        for number, (name, run) in enumerate(tasks):
            progress(name, number, len(tasks))
            run()
        progress("summation trees done", len(tasks), len(tasks))
    return proof


Task = tuple[str, Callable[[], None]]


def _tasks(
    proof: TreeProof, ops: Sequence[Op], device: torch.device, quick: bool, kernels: SumKernels
) -> Iterator[Task]:
    using = {
        header: [op for op in ops if any(path.name == header for path in op.sources)]
        for header in (ROW_SUM, HEAD_NORM, LAYER_NORM)
    }
    work = _GpuWork(device, quick, kernels) if device.type == "cuda" else _CpuWork(device, quick, kernels)
    for header, run in ((ROW_SUM, work.full_rows), (HEAD_NORM, work.heads)):
        if using[header]:
            for name, findings in run():

                def add(
                    name: str = name, findings: Callable[[], Iterable[Finding]] = findings, header: str = header
                ) -> None:
                    try:
                        found = list(findings())
                    except Exception as error:  # the rest of the proof goes on
                        proof.rows += [_failed(op, name, error) for op in using[header]]
                        return
                    proof.findings += found
                    for op in using[header]:
                        proof.rows += _record(op, found)

                yield name, add
    if using[LAYER_NORM]:
        for dtype in (BF16, FP16, FP32):
            users = [op for op in using[LAYER_NORM] if any(case.dtype == dtype for case in op.cases)]
            if users:

                def moments(dtype: torch.dtype = dtype, users: Sequence[Op] = users) -> None:
                    try:
                        rows = work.moments(dtype)
                    except Exception as error:
                        proof.rows += [_failed(op, f"LayerNorm's moments, {_name(dtype)}", error) for op in users]
                        return
                    proof.rows += [{"op": op.name, **row} for row in rows for op in users]

                yield f"LayerNorm's moments, {_name(dtype)}", moments
    for name, control in work.controls({header for header, users in using.items() if users}):

        def judge(name: str = name, control: Callable[[], bool] = control) -> None:
            try:
                proof.controls.append((name, control()))
            except Exception as error:  # what could not be run was not caught
                proof.notes.append(f"the control {name!r} could not be run: {type(error).__name__}: {error}")
                proof.controls.append((name, False))

        yield f"control: {name}", judge

    def draw() -> None:
        proof.pictures += work.pictures(proof.findings)
        proof.notes += work.notes

    yield "pictures of the trees", draw


def _record(op: Op, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Record rows of an op: its findings, those of one kind together."""
    kinds: dict[tuple[Any, ...], list[Finding]] = {}
    for one in findings:
        if one.side == "eager" or any(case.dtype == one.dtype for case in op.cases):
            kinds.setdefault((one.side, one.what, one.dtype, one.offset > 0, one.method), []).append(one)
    rows = []
    for (side, what, dtype, unaligned, method), found in kinds.items():
        wrong = [one for one in found if one.wrong is not None]
        step = f"{what}: {'eager' if side == 'eager' else 'the kernel'}'s order of summation"
        if unaligned:
            step += ", unaligned (fp32 rows of which the op takes none; their tree is found all the same)"
        row: dict[str, Any] = {
            "op": op.name,
            "dtype": _name(dtype),
            "step": step,
            "domain": _domain(found),
            "checked": len(found),
            "differ": len(wrong),
            "method": method,
        }
        if wrong:
            row["first"] = f"{wrong[0].rows} rows of {wrong[0].width}: {wrong[0].wrong}"
        rows.append(row)
    return rows


def _failed(op: Op, step: str, error: Exception) -> dict[str, Any]:
    """A row of what could not be run: it proves nothing and says why."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    row = {"op": op.name, "dtype": "", "step": step, "domain": "", "checked": 0, "differ": 0, "method": "not run"}
    return {**row, "error": told}


def _domain(found: Sequence[Finding]) -> str:
    rows, widths = sorted({one.rows for one in found}), sorted({one.width for one in found})
    additions, trees = sum(one.additions for one in found), len({one.tree for one in found})
    shown = ", ".join(map(str, widths if len(widths) <= 12 else [*widths[:6], "...", *widths[-4:]]))
    return (
        f"{', '.join(map(str, rows))} rows; widths {shown}: {_count(len(found), 'geometry', 'geometries')}, "
        f"{_count(trees, 'distinct tree', 'distinct trees')}, {additions:,} additions"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


class _Work:
    """What is common to a GPU and a CPU: how one side of one geometry is asked."""

    def __init__(self, device: torch.device, quick: bool, kernels: SumKernels) -> None:
        self.device, self.quick, self.kernels = device, quick, kernels
        self.notes: list[str] = []
        self.drawn: dict[str, tuple[str, Tree]] = {}
        """By digest: the title and the tree."""

    def ask_kernel(
        self, header: str, what: str, sums: Callable[[Tensor], Tensor], dtype: torch.dtype, at: Geometry, tree: Tree
    ) -> Finding:
        """Confirm a kernel's tree. Its launches may have any number of rows."""
        rows = KERNEL_ROWS if self.device.type == "cuda" else HOST_ROWS
        wrong = confirm(Probe(sums, at.width, rows, dtype, self.device), tree, ask_squares)
        return Finding(
            header, "kernel", what, dtype, at.rows, at.width, 0, CONFIRMED, tree.digest, len(tree.additions), wrong
        )

    def keep(self, title: str, tree: Tree) -> None:
        """Remember a tree for the pictures, under the first title it comes with."""
        self.drawn.setdefault(tree.digest, (title, tree))

    def pictures(self, findings: Sequence[Finding]) -> list[tuple[str, str]]:
        """Draw what was kept; the title says for how many geometries a tree was found."""
        drawn = []
        for digest, (title, tree) in self.drawn.items():
            same = {(one.rows, one.width, one.what) for one in findings if one.tree == digest and one.wrong is None}
            more = f" (and {_count(len(same) - 1, 'geometry', 'geometries')} more)" if len(same) > 1 else ""
            drawn.append((f"{title}{more}", picture(tree, title)))
        return drawn

    def moments_of(self, dtype: torch.dtype, widths: Sequence[int], count: int, eager: bool) -> list[dict[str, Any]]:
        """Compare the kernel's moments, and eager's, with the emulator's."""
        checked, differ, first = Counter[str](), Counter[str](), dict[str, str]()
        for width in widths:
            kernel = self.kernels.moments(dtype, width)
            for name, x in welford.rows_that_tell(count, width, dtype, self.device):
                x = x.contiguous()
                mean, variance = welford.moments(x.float())
                rstd = welford.rsqrt(variance + torch.tensor(EPS, device=self.device))
                expected = [mean, rstd, (rstd[:, None] * (x.float() - mean[:, None])).to(dtype)]
                found = {"the kernel": list(kernel(x, EPS))}
                if eager:
                    y, own_mean, own_rstd = torch.native_layer_norm(x, [width], None, None, EPS)
                    found["eager"] = [own_mean.flatten(), own_rstd.flatten(), y]
                for side, values in found.items():
                    wrong = _rows_that_differ(values, expected[: len(values)])
                    checked[side] += len(x)
                    differ[side] += len(wrong)
                    if wrong:
                        first.setdefault(side, f"row {wrong[0]} of {width} elements, {name!r}")
        rows = []
        for side in checked:
            row = {
                "dtype": _name(dtype),
                "step": f"LayerNorm's mean and rstd{' and result' if side == 'eager' else ''}: {side}",
                "domain": f"rows of widths {', '.join(map(str, widths))}",
                "checked": checked[side],
                "differ": differ[side],
                "method": STEP_BY_STEP,
            }
            rows.append({**row, "first": first[side]} if side in first else row)
        return rows

    def changed_row_sum(self, change: Change, rows: int, width: int) -> bool:
        """Whether the tree of a row sum from a changed header is seen to be another one."""
        at = Geometry(rows, width)
        with SumKernels(self.device, change) as kernels:
            sums = kernels.row_sum(BF16, width, at.plan)
            return self.ask_kernel(ROW_SUM, "control", sums, BF16, at, at.tree).wrong is not None

    def controls(self, headers: set[str]) -> Iterator[tuple[str, Callable[[], bool]]]:
        """Name wrong kernels and plans, each with what says whether it is caught."""
        if ROW_SUM in headers:
            yield (
                "row sum: lanes fold by neighbours, as up to torch 2.9",
                lambda: self.changed_row_sum(LANES_BY_NEIGHBOURS, 16, 256),
            )
            yield (
                "row sum: four accumulators join from the last to the first, one warp a row",
                lambda: self.changed_row_sum(SPLIT_REVERSED, 16, 256),
            )
            yield (
                "row sum: four accumulators join from the last to the first, several warps a row",
                lambda: self.changed_row_sum(ACCUMULATORS_REVERSED, 1, 512),
            )
            yield "row sum: the plan of one row for sixteen", self.plan_of_other_rows
            yield "row sum: one element is left out", lambda: self.changed_row_sum(ELEMENT_MISSING, 16, 256)
        if HEAD_NORM in headers:
            yield "head norm: lanes fold by neighbours", self.changed_heads
            yield "head norm: vectors of fp32 for the mean of a half", self.heads_of_wrong_vector
        if LAYER_NORM in headers:
            yield "LayerNorm: lanes fold by neighbours", self.changed_moments
            yield (
                "LayerNorm: no fused multiply-add in the emulator",
                lambda: self.wrong_emulator(lambda x: welford.moments(x, welford.two_roundings)),
            )
            yield (
                "LayerNorm: two partial results join with their sides exchanged",
                lambda: self.wrong_emulator(lambda x: welford.moments(x, swapped=True)),
            )

    def plan_of_other_rows(self) -> bool:
        one, sixteen = Geometry(1, 256), Geometry(16, 256)
        sums = self.kernels.row_sum(BF16, 256, one.plan)
        return self.ask_kernel(ROW_SUM, "control", sums, BF16, sixteen, sixteen.tree).wrong is not None

    def changed_heads(self) -> bool:
        at = Geometry(16, 128)
        with SumKernels(self.device, LANES_BY_NEIGHBOURS) as kernels:
            sums = kernels.head_sum(BF16, 128, "diffusers", None)
            return self.ask_kernel(HEAD_NORM, "control", sums, BF16, at, at.tree).wrong is not None

    def heads_of_wrong_vector(self) -> bool:
        at = Geometry(16, 128, BF16)
        sums = self.kernels.head_sum(BF16, 128, "native", Geometry(16, 128).plan)
        return self.ask_kernel(HEAD_NORM, "control", sums, BF16, at, at.tree).wrong is not None

    def changed_moments(self) -> bool:
        with SumKernels(self.device, MOMENTS_BY_NEIGHBOURS) as kernels:
            return self._moments_differ(kernels, lambda x: welford.moments(x))

    def wrong_emulator(self, emulate: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
        return self._moments_differ(self.kernels, emulate)

    def _moments_differ(self, kernels: SumKernels, emulate: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
        kernel = kernels.moments(FP32, 1000)
        for _, x in welford.rows_that_tell(16, 1000, FP32, self.device):
            mean, variance = emulate(x.float())
            rstd = welford.rsqrt(variance + torch.tensor(EPS, device=self.device))
            if _rows_that_differ(kernel(x.contiguous(), EPS), (mean, rstd)):
                return True
        return False


class _GpuWork(_Work):
    """Both sides of everything."""

    def full_rows(self) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
        """Eager's mean over full rows and the kernels' sums."""
        widths = QUICK_WIDTHS if self.quick else WIDTHS
        geometries = list(dict.fromkeys([Geometry(rows, width) for rows in ROWS for width in widths]))
        edges = [at for at in thresholds(128) if at not in geometries]
        yield "eager's means of full rows", lambda: [self.ask_eager(ROW_SUM, at) for at in geometries]
        yield "eager's means on both sides of each threshold", lambda: [self.ask_eager(ROW_SUM, at) for at in edges]
        offsets = [
            Geometry(rows, width, FP32, shift) for rows in (1, 16) for width in UNALIGNED_WIDTHS for shift in (1, 2, 3)
        ]
        yield "eager's means of unaligned rows", lambda: [self.ask_eager(ROW_SUM, at) for at in offsets]
        for dtype in (BF16, FP16, FP32):
            some = [at for at in geometries + edges if at.width >= 128]
            if self.quick and dtype != BF16:
                some = [at for at in some if at.width in (256, 3840)]

            def kernels(dtype: torch.dtype = dtype, some: Sequence[Geometry] = some) -> Iterable[Finding]:
                return self.ask_row_sums(dtype, some)

            yield f"the kernels' sums of full rows, {_name(dtype)}", kernels

    def heads(self) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
        """The means over heads of the three references, and the kernels'."""
        heads = QUICK_HEADS if self.quick else HEADS
        for kind in KINDS:
            for dtype in (BF16, FP16) if kind == "native" else (BF16, FP16, FP32):

                def both(kind: str = kind, dtype: torch.dtype = dtype) -> Iterator[Finding]:
                    for head_dim in heads:
                        yield from self.ask_heads(kind, dtype, head_dim)

                yield f"heads, {kind}, {_name(dtype)}", both

    def moments(self, dtype: torch.dtype) -> list[dict[str, Any]]:
        """LayerNorm's moments: eager, kernel and emulator."""
        return self.moments_of(dtype, QUICK_MOMENT_WIDTHS if self.quick else MOMENT_WIDTHS, 512, eager=True)

    def ask_eager(self, header: str, at: Geometry) -> Finding:
        """Find the tree of eager's ``mean(-1)``."""
        probe = Probe(planner.mean, at.width, at.rows, at.dtype, self.device, at.offset)
        tree, limit = at.tree, QUICK_BLIND_CALLS if self.quick else BLIND_CALLS
        name = f"mean of {_count(at.rows, 'row', 'rows')} of {at.width:,} {_name(at.dtype)} numbers"
        # Halves come back rounded to a half, which a sum of units does not survive.
        blind = at.dtype == FP32 and 6 * at.width // at.rows <= limit and at.width <= 4096
        wrong = None if blind else confirm(probe, tree, ask_signed)
        if blind or (wrong is not None and at.dtype == FP32):
            try:
                found = recover(probe)
                wrong = tree.differs_from(found) or wrong
                if wrong is not None:
                    self.keep(f"eager: {name}, not the planned tree", found)
            except ValueError as error:
                wrong = str(error)
        if wrong is None and at.width in PICTURED:
            self.keep(f"eager and kernel: {name}" if at.offset == 0 else f"eager: {name}, {at.offset} off", tree)
        method = RECOVERED if blind else CONFIRMED
        additions = len(tree.additions)
        return Finding(
            header, "eager", "mean", at.dtype, at.rows, at.width, at.offset, method, tree.digest, additions, wrong
        )

    def ask_row_sums(self, dtype: torch.dtype, geometries: Sequence[Geometry]) -> Iterator[Finding]:
        """Confirm the sums of ``_row_sum.cuh`` for every plan among some geometries."""
        plans = {(at.plan, at.width): at for at in geometries}
        with ThreadPoolExecutor(8, "samebits-compile") as pool:
            made = {at: pool.submit(self.kernels.row_sum, dtype, width, plan) for (plan, width), at in plans.items()}
            found = {
                (at.plan, at.width): self.ask_kernel(ROW_SUM, "sum of squares", sums.result(), dtype, at, at.tree)
                for at, sums in made.items()
            }
        for at in geometries:
            yield replace(found[at.plan, at.width], rows=at.rows)

    def ask_heads(self, kind: str, dtype: torch.dtype, head_dim: int) -> Iterator[Finding]:
        """Find eager's and the kernels' trees over heads for one reference."""
        what = {"diffusers": "mean over heads", "native": "mean over heads in half", "torch": "F.rms_norm over heads"}
        reads = dtype if kind == "native" else FP32
        if kind == "torch":
            tree = _layer_norm_planned(head_dim)
            plan = planner.ReducePlan(columns=64, groups=1, vector=4)
            wrong = planner.probe_rms_norm(64, head_dim, dtype, self.device)
            yield Finding(
                HEAD_NORM,
                "eager",
                what[kind],
                dtype,
                64,
                head_dim,
                0,
                CONFIRMED,
                tree.digest,
                len(tree.additions),
                wrong,
            )
            if wrong is None and head_dim in PICTURED:
                self.keep(f"eager and kernel: F.rms_norm over {head_dim} numbers", tree)
            yield from self._kernels_of_heads(kind, what[kind], dtype, Geometry(64, head_dim), plan, tree)
            return
        done = set()
        for rows in ROWS:
            at = Geometry(rows, head_dim, reads)
            if kind == "native" or dtype == BF16:  # eager squares in fp32, whatever the element type
                yield replace(self.ask_eager(HEAD_NORM, at), what=what[kind])
            if at.plan not in done:
                done.add(at.plan)
                yield from self._kernels_of_heads(kind, what[kind], dtype, at, at.plan, at.tree)

    def _kernels_of_heads(
        self, kind: str, what: str, dtype: torch.dtype, at: Geometry, plan: ReducePlan, tree: Tree
    ) -> Iterator[Finding]:
        ways: list[ReducePlan | None] = [plan]
        if at.width == 128 and dtype in HALVES:
            ways.append(None)
        for way in ways:
            sums = self.kernels.head_sum(dtype, at.width, kind, way)
            name = what if way is not None else f"{what} of 128, half a warp a row"
            yield self.ask_kernel(HEAD_NORM, name, sums, dtype, at, tree)

    def controls(self, headers: set[str]) -> Iterator[tuple[str, Callable[[], bool]]]:
        yield from super().controls(headers)
        if headers & {ROW_SUM, HEAD_NORM}:
            yield "eager against the order of torch 2.9 and earlier", self.eager_against_older
            yield "eager against the plan of another number of rows", self.eager_against_other_rows
            yield "eager against the tree of unaligned rows", self.eager_against_unaligned

    def eager_against_older(self) -> bool:
        plan = reduce_plan(16, 256, 4, OLDER)
        return plan is not None and self._eager_is_not(16, reduce_tree(plan, 256, rules=OLDER))

    def eager_against_other_rows(self) -> bool:
        return self._eager_is_not(16, Geometry(1, 256).tree) and self._eager_is_not(1, Geometry(16, 256).tree)

    def eager_against_unaligned(self) -> bool:
        return self._eager_is_not(16, Geometry(16, 256, FP32, 1).tree)

    def _eager_is_not(self, rows: int, tree: Tree) -> bool:
        probe = Probe(planner.mean, tree.leaves, rows, FP32, self.device)
        return confirm(probe, tree, ask_signed) is not None and recover(probe) != tree


class _CpuWork(_Work):
    """The kernels behind the shim against the planned trees; torch's CPU sums are only shown."""

    def full_rows(self) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
        """The kernels' sums of a few geometries, and the trees of torch's CPU sums."""
        few = [(16, 128, BF16), (16, 256, BF16), (1, 512, BF16)]
        more = [(4, 1024, BF16), (16, 256, FP16), (16, 256, FP32), (8, 3072, BF16)]

        def kernels() -> Iterator[Finding]:
            for rows, width, dtype in few if self.quick else few + more:
                at = Geometry(rows, width)
                sums = self.kernels.row_sum(dtype, width, at.plan)
                found = self.ask_kernel(ROW_SUM, "sum of squares", sums, dtype, at, at.tree)
                if found.wrong is None:
                    self.keep(f"kernel: sum of {_count(rows, 'row', 'rows')} of {width:,} squares", at.tree)
                yield found

        yield "the kernels' sums of full rows", kernels

        def show() -> Iterator[Finding]:
            for width in (128,) if self.quick else (128, 3072):
                tree = recover(Probe(planner.mean, width, 16, FP32, self.device))
                self.keep(f"torch's CPU: mean of 16 rows of {width} float32 numbers, shown and not claimed", tree)
                differs = tree.differs_from(Geometry(16, width).tree)
                self.notes.append(
                    f"torch's CPU sums 16 rows of {width} numbers "
                    f"{'in the order of its CUDA kernel' if differs is None else f'in another order: {differs}'}; "
                    "nothing follows from that for a GPU"
                )
            yield from ()

        yield "torch's CPU means", show

    def heads(self) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
        """The kernels' sums over heads of 128 and of another length."""

        def kernels() -> Iterator[Finding]:
            for kind in KINDS:
                for head_dim, own in ((128, False), (72, True)):
                    at = Geometry(16, head_dim, BF16 if kind == "native" else FP32)
                    tree, plan = at.tree, at.plan
                    if kind == "torch":
                        tree, plan = _layer_norm_planned(head_dim), planner.ReducePlan(64, 1, 4)
                    sums = self.kernels.head_sum(BF16, head_dim, kind, plan if own else None)
                    yield self.ask_kernel(HEAD_NORM, f"{kind} norm over heads", sums, BF16, at, tree)

        yield "the kernels' sums over heads", kernels

    def moments(self, dtype: torch.dtype) -> list[dict[str, Any]]:
        """LayerNorm's moments: kernel and emulator."""
        if self.quick and dtype != BF16:
            return []
        return self.moments_of(dtype, (516,) if self.quick else (128, 1000, 3072), 8, eager=False)


# Deliberately wrong: each is a change of one header.
LANES_BY_NEIGHBOURS = Change(
    "_numerics.cuh",
    "for (int offset = width / 2; offset > 0; offset /= 2) a = __fadd_rn(a, __shfl_xor_sync",
    "for (int offset = 1; offset < width; offset *= 2) a = __fadd_rn(a, __shfl_xor_sync",
)
SPLIT_REVERSED = Change(
    ROW_SUM,
    "float total = a;\n#pragma unroll\n"
    "    for (int i = 1; i < 4; i++) total = __fadd_rn(total, __shfl_down_sync(ALL_LANES, a, i));",
    "float total = __shfl_down_sync(ALL_LANES, a, 3);\n"
    "    for (int i = 2; i >= 0; i--) total = __fadd_rn(total, __shfl_down_sync(ALL_LANES, a, i));",
)
ACCUMULATORS_REVERSED = Change(
    "_numerics.cuh",
    "float total = a[0];\n#pragma unroll\n  for (int i = 1; i < N; i++) total",
    "float total = a[N - 1];\n#pragma unroll\n  for (int i = N - 2; i >= 0; i--) total",
)
ELEMENT_MISSING = Change(
    ROW_SUM, "const float f = widen(row[at]);", "const float f = at == 77 ? 0.0f : widen(row[at]);"
)
MOMENTS_BY_NEIGHBOURS = Change(
    LAYER_NORM,
    "for (int offset = 16; offset > 0; offset /= 2) {",
    "for (int offset = 1; offset < 32; offset *= 2) {",
)


def _rows_that_differ(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[int]:
    """Rows of which some value has other bits; a NaN is a NaN."""
    wrong = torch.zeros(len(expected[0]), dtype=torch.bool, device=expected[0].device)
    for one, other in zip(found, expected, strict=True):
        integers = torch.int32 if one.dtype == FP32 else torch.int16
        differ = (one.view(integers) != other.view(integers)) & ~(one.isnan() & other.isnan())
        wrong |= differ.reshape(len(wrong), -1).any(1)
    return wrong.nonzero().flatten().tolist()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
