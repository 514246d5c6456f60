"""Joins the parts of the proof: steps, whole calls, summation trees, controls, one task after the other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch

from samebits.ops import Case, Op
from samebits.proof import controls, record, rows, trees, wrong
from samebits.proof.chains import STEPS
from samebits.proof.domains import domain_of
from samebits.proof.forms import FORMS, Inputs
from samebits.proof.probe import Outcome, Probes
from samebits.proof.record import Proof, Row
from samebits.proof.rows import Shape
from samebits.proof.steps import Step, Unit
from samebits.proof.workshop import Workshop

ROWS, QUICK_ROWS = 100_000_000, 1_000_000
"""Random rows for each op and element type."""
WIDE_SHARE = 0.25
"""How many of them are as wide as the families' rows; the others are narrow, where a row costs little."""
SECONDS, QUICK_SECONDS = 5.0, 0.5
"""The most that one kind of random rows may take; the record says how many rows there were."""
CPU_ROWS = 200
LIBRARY_DRAWS = 4
DRAWS, QUICK_DRAWS = 16, 8

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many tasks are done, and how many there are."""


@dataclass(frozen=True)
class Task:
    """A piece of work that gives one finding, and how to compile for it ahead of time."""

    name: str
    run: Callable[[], None]
    warm: Callable[[], object] | None = None


class Run:
    """One run of the proof: what it was asked for, and what it has found so far."""

    def __init__(self, ops: Sequence[Op], device: torch.device, quick: bool, shapes: Sequence[Shape]) -> None:
        self.ops, self.device, self.quick, self.shapes = ops, device, quick, shapes
        self.whole = device.type == "cuda"
        self.rows: list[Row] = []
        self.verdicts: list[controls.Verdict] = []
        self.pictures: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.say: Callable[[str], None] = lambda text: None
        self.distinct = 0
        self._probes: dict[tuple[Unit, torch.dtype], Probes] = {}
        self._workshop = Workshop()

    def close(self) -> None:
        self._workshop.close()

    def tasks(self) -> Iterator[Task]:
        """Everything that is to be done."""
        yield from self._steps()
        for op in self.ops:
            if not op.moves_bytes:
                yield from self._library(op)
                continue
            if op.name not in STEPS or op.name not in FORMS:
                yield Task(op.name, partial(self._undeclared, op))
                continue
            for dtype in dtypes_of(op):
                yield from self._calls(op, dtype)
        yield Task("summation trees", self._trees)
        for control in wrong.CONTROLS:
            yield Task(f"control: {control.name}", partial(self._control, control))

    def _steps(self) -> Iterator[Task]:
        units: dict[tuple[Unit, torch.dtype], dict[Step, list[str]]] = {}
        for op in self.ops:
            for step in STEPS.get(op.name, ()):
                for dtype in dtypes_of(op):
                    if dtype in step.dtypes and (self.whole or step.portable):
                        units.setdefault((step.unit, dtype), {}).setdefault(step, []).append(op.name)
        for (unit, dtype), steps in units.items():

            def probes(
                unit: Unit = unit,
                dtype: torch.dtype = dtype,
                steps: Sequence[Step] = tuple(steps),
                lock: Lock = Lock(),  # noqa: B008 - one for each unit, which a thread may compile ahead
            ) -> Probes:
                with lock:
                    known = self._probes.get((unit, dtype))
                    if known is None:
                        known = Probes(self._workshop.path, unit, dtype, steps, self.device)
                        self._probes[unit, dtype] = known
                return known

            for number, (step, names) in enumerate(steps.items()):

                def run(
                    probes: Callable[[], Probes] = probes,
                    step: Step = step,
                    dtype: torch.dtype = dtype,
                    names: Sequence[str] = names,
                ) -> None:
                    self._step(probes, step, dtype, names)

                yield Task(f"{step.name}, {_short(dtype)}", run, probes if number == 0 else None)

    def _library(self, op: Op) -> Iterator[Task]:
        """An op that is held against a library's product or attention: its own cases are compared.

        Which kernel the library runs, and so in which order it sums up, is its choice for each signature. So only the
        signatures seen are shown.
        """
        name = f"calls of torch's {op.library}" if op.library else "calls beside the library's product"
        if not op.is_for(self.device):
            self.notes.append(f"{op.name}: not compared here: it is written for {', '.join(op.architectures)}")
            return
        for case in op.cases if self.whole else ():
            if self.quick and case.name not in op.headline:
                continue

            def run(case: Case = case) -> Outcome:
                return rows.case(op, case, self.device, LIBRARY_DRAWS)

            yield self._task(op, case.dtype, name, case.name, "sampled", run)

    def _undeclared(self, op: Op) -> None:
        error = LookupError("chains.STEPS or forms.FORMS has no entry for this op")
        self.rows.append(record.failed(op.name, dtypes_of(op)[0], "every step", "none", "none", error))

    def _step(self, probes: Callable[[], Probes], step: Step, dtype: torch.dtype, names: Sequence[str]) -> None:
        domain = domain_of(step, dtype, self.whole)
        method = "exhaustive" if domain.exhaustive else "sampled"
        try:
            found = probes().run(step, self.whole)
            self.distinct += found.checked
            self.rows += [record.row(name, dtype, step.name, domain.said, method, found) for name in names]
        except Exception as error:  # a row that says so, then the next step
            self.rows += [record.failed(name, dtype, step.name, domain.said, method, error) for name in names]

    def _calls(self, op: Op, dtype: torch.dtype) -> Iterator[Task]:
        form = FORMS[op.name]
        if not self.whole and not form.portable:
            return
        # Before a norm every pair takes its time, and the steps have had them all.
        every_call = form.every if dtype.itemsize == 2 and not (self.quick and form.before_norm) else {}
        for name in every_call:
            pairs, part = form.every[name].pairs, "" if self.whole else "a part of "
            domain = f"{part}all 2^32 pairs, through the kernel" if pairs else "all 2^16 values, through the kernel"
            method = "exhaustive" if self.whole or not pairs else "sampled"

            def every(name: str = name) -> Outcome:
                return rows.every_pair(op, form, name, dtype, self.device, self.whole)

            yield self._task(op, dtype, name, domain, method, every)
        variants = form.variants_of(dtype)
        for variant in variants:
            for shape in (*rows.adversarial_shapes(form, self.quick, self.whole), *self.shapes):
                yield from self._adversarial(op, dtype, variant, shape)
            target = (QUICK_ROWS if self.quick else ROWS) // len(variants)
            wide, narrow = Shape(*form.wide), Shape(*form.narrow)
            kinds = [(wide, target)] if wide == narrow else [(wide, WIDE_SHARE * target), (narrow, target)]
            if not self.whole:
                kinds = [(Shape(CPU_ROWS, narrow.width), CPU_ROWS)]
            # The narrow ones make up for the wide ones that the time did not allow.
            for shape, wanted in (*kinds, *((shape, target / 10) for shape in self.shapes)):
                yield from self._random(op, dtype, variant, shape, int(wanted))

    def _adversarial(self, op: Op, dtype: torch.dtype, variant: str, shape: Shape) -> Iterator[Task]:
        form = FORMS[op.name]
        if shape in self.shapes and rows.fits(op, form, dtype, shape, variant, self.device) is not None:
            return
        draws = (QUICK_DRAWS if self.quick else DRAWS) if self.whole else 2

        def run() -> Outcome:
            return rows.adversarial(op, form, dtype, shape, variant, self.device, draws)

        yield self._task(
            *(op, dtype, "adversarial rows", _where(shape, variant), "adversarial", run),
            partial(self._prepare, op, dtype, variant, shape),
        )

    def _prepare(self, op: Op, dtype: torch.dtype, variant: str, shape: Shape) -> None:
        """Compile for a whole call."""
        args = FORMS[op.name].build(Inputs(dtype, self.device), shape.rows, shape.width, variant)
        if op.unsupported(*args) is None:
            op.prepare(*args)

    def _random(self, op: Op, dtype: torch.dtype, variant: str, shape: Shape, wanted: int) -> Iterator[Task]:
        form = FORMS[op.name]
        if shape in self.shapes and rows.fits(op, form, dtype, shape, variant, self.device) is not None:
            return
        limit = QUICK_SECONDS if self.quick else SECONDS

        def run() -> Outcome:
            return rows.random(op, form, dtype, shape, variant, self.device, wanted, limit)

        yield self._task(
            *(op, dtype, "random rows", _where(shape, variant), "random", run),
            partial(self._prepare, op, dtype, variant, shape),
        )

    def _task(
        self,
        op: Op,
        dtype: torch.dtype,
        step: str,
        domain: str,
        method: str,
        run: Callable[[], Outcome],
        warm: Callable[[], object] | None = None,
    ) -> Task:
        def work() -> None:
            try:
                found = run()
                self.distinct += found.checked
                self.rows.append(record.row(op.name, dtype, step, domain, method, found))
            except Exception as error:
                self.rows.append(record.failed(op.name, dtype, step, domain, method, error))

        return Task(f"{op.name} {_short(dtype)}: {step}, {domain}", work, warm)

    def _control(self, control: controls.Control) -> None:
        try:
            self.verdicts.append(controls.run(control, self.device))
        except Exception as error:  # what could not be run was not caught
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
            self.verdicts.append(controls.Verdict(control.name, False, told))

    def _trees(self) -> None:
        def say(text: str, done: int, total: int) -> None:
            self.say(f"{text} ({done} of {total})")

        try:
            found = trees.prove_trees(self.ops, self.device, self.quick, say)
        except Exception as error:
            self.rows += [
                record.failed(op.name, dtypes_of(op)[0], "summation trees", "none", "trees", error) for op in self.ops
            ]
            return
        self.rows += found.rows
        self.pictures += found.pictures
        self.notes += found.notes
        seen = {True: "the tree is another one, or a row differs", False: "nothing was seen"}
        self.verdicts += [controls.Verdict(name, caught, seen[caught]) for name, caught in found.controls]


def prove(
    ops: Sequence[Op],
    device: torch.device,
    *,
    quick: bool = False,
    shapes: Sequence[Shape] = (),
    progress: Progress = lambda text, done, total: None,
) -> Proof:
    """Prove ``ops`` on ``device``.

    Parameters
    ----------
    ops : sequence of Op
    device : torch.device
        A CUDA device. On the CPU the machinery runs on a part of everything; the proof says what that shows.
    quick : bool
        Fewer row counts and random rows; every domain of every step all the same.
    shapes : sequence of Shape
        Further shapes at which whole calls are compared.
    progress : callable
    """
    started = time.perf_counter()
    run = Run(ops, device, quick, shapes)
    pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)), "samebits-compile") if run.whole else None
    try:
        with torch.no_grad():
            tasks = list(run.tasks())
            for task in tasks:
                if pool is not None and task.warm is not None:
                    pool.submit(_quietly, task.warm)
            for number, task in enumerate(tasks):
                progress(task.name, number, len(tasks))
                run.say = partial(_within, progress, number, len(tasks))
                task.run()
            progress("done", len(tasks), len(tasks))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        run.close()
    seconds = time.perf_counter() - started
    places = {op.name: number for number, op in enumerate(ops)}
    run.rows.sort(key=lambda row: places[row["op"]])
    return Proof(run.rows, run.verdicts, run.pictures, seconds, run.whole, quick, run.distinct, tuple(run.notes))


def _within(progress: Progress, done: int, total: int, text: str) -> None:
    """Tell what a task is at, while the count of tasks stays."""
    progress(text, done, total)


def _quietly(warm: Callable[[], object]) -> None:
    """Compile ahead; what fails here fails again where it is told."""
    try:
        with torch.no_grad():
            warm()
    except Exception:
        return


def dtypes_of(op: Op) -> list[torch.dtype]:
    """The element types that the op's cases have, halves first."""
    known = {case.dtype for case in op.cases}
    return [dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in known]


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _where(shape: Shape, variant: str) -> str:
    return f"{shape}{' ' if variant else ''}{variant}"
