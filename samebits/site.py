"""A site: a place in a model where an op stands for lines of the original forward. The way of every call.

A verified call may cost five microseconds of Python beyond its launch, so :meth:`Site.__call__` is written for speed
and everything that is not a verified call is handed to the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from samebits import capture
from samebits.guess import Guess, make_guess
from samebits.ops._op import Launcher, Op, Outputs
from samebits.signature import Key, signature_key
from samebits.verdict import FINAL, Counters, Table
from samebits.watch import NEVER, first_due, gap

if TYPE_CHECKING:
    from samebits.gate import Gate

GUESSES = 4
"""How many signatures a site guesses at. Two are usual: the prompt and the negative prompt differ in length."""
LEARN_EVERY = 64
"""A site that made so many guesses makes another one, in the place of its oldest, only after so many fused calls."""

_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state


class Site:
    """Calls an op's kernel where its bits are known to be eager's, and its reference everywhere else.

    Made by :meth:`samebits.gate.Gate.site`. Call it with exactly the positional arguments of the op's reference.

    Attributes
    ----------
    name : str
        Where in the model it stands, for the report.
    op : Op
        What it computes.
    host : bool
        Whether CPU tensors go to the kernel built for the CPU.
    counters : Counters
        How many calls went which way, and why.
    """

    __slots__ = (
        "__weakref__",
        "_due",
        "_every",
        "_fast",
        "_gate",
        "_guesses",
        "_learnt",
        "_next",
        "_pending",
        "_reference",
        "_strict",
        "_table",
        "_tries",
        "counters",
        "host",
        "name",
        "op",
    )

    def __init__(
        self, name: str, op: Op, gate: Gate, table: Table, strict: bool | None, every: int | None, number: int
    ) -> None:
        self.name = name
        self.op = op
        self.host = table.host
        self.counters = Counters()
        self._strict = strict
        self._gate = gate
        self._table = table
        self._reference = op.reference
        # Kept here because two look-ups less are a tenth of a microsecond on every call.
        self._fast = table.launchers
        self._pending = gate.pending
        self._guesses: tuple[Guess, ...] = ()
        self._learnt = self._tries = 0
        self._every = every
        self._next = self._due = NEVER
        """How many fused calls there have been when the next one is compared again, and when one goes by the gate."""
        if self.every and not table.host:
            self._next = self._due = first_due(number, self.every)

    @property
    def strict(self) -> bool:
        """Whether a refused or failed signature raises here instead of running eager."""
        return self._gate.strict if self._strict is None else self._strict

    def obstacle(self, device: torch.device) -> str | None:
        """Say why no call on ``device`` would reach a kernel here, or return ``None``."""
        return self._gate.stopped or self._gate.unavailable(device, self.host)

    def __call__(self, *args: Any) -> Outputs:
        """Return what the reference returns for ``args``, bit for bit.

        Raises
        ------
        ContractViolation, KernelFailed
            Strict sites only: this signature's kernel gives other bits, or could not be built or launched.
        CudaContextError
            The CUDA context is lost; nothing can be computed any more.
        """
        if is_dynamo_compiling():
            # A constant to the tracer, which follows the reference from here and never sees the lines below: the
            # graph is the one that it makes without this library. Nothing is counted, or the count would be traced.
            return self._reference(*args)
        if (
            _grad_enabled()
            or _any_autocast()
            or _dispatch_modes()
            or _function_modes()
            or _functorch() is not None
            or _jit_tracing() is not None
            or forward_ad._current_level >= 0
        ):
            reason = _eager_state(args)
            if reason is not None:
                return self.run_eager(args, reason)
        for guess in self._guesses:
            launcher = guess(args)
            if launcher is not None:
                break
        else:
            key = signature_key(args)
            launcher = self._fast.get(key)
            if launcher is None:
                return self._gate.answer(self, self._table, key, args)
            self._learn(key, args)
        if self._pending or self.counters.fused >= self._due:
            return self._gate.answer(self, self._table, signature_key(args), args)
        try:
            outputs = launcher(*args)
        except Exception as error:
            raised = error
        else:
            # Exact with several threads too: no bytecode of this statement lets go of the interpreter lock.
            self.counters.fused += 1
            return outputs
        try:
            return self._gate.launch_raised(self, self._table, signature_key(args), args, raised)
        finally:
            del raised  # Its traceback holds this frame: a cycle that would keep the tensors alive.

    def final(self, args: tuple[Any, ...]) -> str | None:
        """Say why the reference answers every call of the signature of ``args``, or ``None`` where that may change."""
        key = signature_key(args)
        entry = None if key is None else self._table.entries.get(key)
        return entry.reason if entry is not None and entry.state in FINAL else None

    @property
    def every(self) -> int:
        """One verified call in how many is compared again, on average; 0 for none."""
        return self._gate.recheck_every if self._every is None else self._every

    @property
    def due(self) -> bool:
        """Whether this verified call is to be compared again."""
        return self.counters.fused >= self._next

    def plan(self, number: int) -> None:
        """Choose the next call to be compared again; ``number`` counts the choices of the gate."""
        self._next = self._due = self.counters.fused + gap(number, self.every) - 1 if self.every else NEVER

    def come_by(self, calls: int | None) -> None:
        """Go by the gate once more after ``calls`` fused calls, to read an answer, or ``None`` when there is none."""
        self._due = self._next if calls is None else min(self._next, self.counters.fused + calls)

    def _learn(self, key: Key | None, args: tuple[Any, ...]) -> None:
        """A verified call was found by its key: guess at it from now on."""
        fused = self.counters.fused
        if (self._tries >= GUESSES and fused - self._learnt < LEARN_EVERY) or not self._gate.guessing:
            return
        entry = None if key is None else self._table.entries.get(key)
        if entry is None:
            return
        self._tries, self._learnt = self._tries + 1, fused
        guess = make_guess(entry, args)
        if guess is not None:
            self._guesses = (guess, *self._guesses[: GUESSES - 1])

    def launch(self, launcher: Launcher, key: Key, args: tuple[Any, ...]) -> Outputs:
        """Run a verified kernel off the fast way."""
        try:
            outputs = launcher(*args)
        except Exception as error:
            raised = error
        else:
            self.counters.fused += 1
            return outputs
        try:
            return self._gate.launch_raised(self, self._table, key, args, raised)
        finally:
            del raised

    def run_eager(self, args: tuple[Any, ...], reason: str) -> Outputs:
        """Run the reference and count the call under ``reason``. What the reference raises is the caller's own."""
        outputs = self._reference(*args)
        self._gate.count_eager(self.counters, reason)
        return outputs

    def __repr__(self) -> str:
        return f"<Site {self.name!r} of op {self.op.name}: {self.counters.fused} fused, {self.counters.eager} eager>"

    def __copy__(self) -> Site:
        return self._gate.site(self.name, self.op, strict=self._strict, host=self.host, recheck_every=self._every)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        # A copied model is another model: it shares the verdicts and counts its own calls.
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        # Kernels and verdicts belong to a process, so only the names travel.
        return _revive, (self.name, self.op.name, self._strict, self.host, self._every)


def _revive(name: str, op_name: str, strict: bool | None, host: bool, every: int | None = None) -> Site:
    from samebits.gate import default_gate
    from samebits.ops import by_name

    return default_gate().site(name, by_name(op_name), strict=strict, host=host, recheck_every=every)


def _eager_state(args: tuple[Any, ...]) -> str | None:
    """Say which state of this thread sends a call to the reference, or return ``None``."""
    reason = capture.interception()
    if reason is not None:
        return reason
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if _any_autocast():
        for kind in dict.fromkeys(tensor.device.type for tensor in tensors):
            if torch.is_autocast_enabled(kind):
                return f"autocast is on for {kind}"
    if _grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "an argument requires grad"
    return None
