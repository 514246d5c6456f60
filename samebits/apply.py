"""``apply(pipe)``: finds the denoisers, puts each family's forwards on them, and returns the handle to undo it."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from samebits.environment import fingerprint
from samebits.errors import AlreadyAppliedError, UnsupportedModelError
from samebits.gate import AWAITED, CAPTURING, ELSEWHERE, HINTED, RETRY, Gate, checked_recheck_every, default_gate
from samebits.graphs import MAX_GRAPHS, DenoiserGraphs, GraphRow
from samebits.models import FAMILIES, Family, family_of, unwrapped
from samebits.models._family import Line, Replacement
from samebits.models._packed import free_cached_memory
from samebits.ops import by_name
from samebits.patch import Patch, find, obstacle
from samebits.quality import Decision, Place, decide, find_record
from samebits.quality.decision import CONTRACTS
from samebits.quality.weights import model_hash
from samebits.quant import how_linears_run
from samebits.quant.linear import Fp8Linear, Quantizer, scheme_of
from samebits.settings import settings
from samebits.trust import TRUSTS, default_store
from samebits.verdict import Revocation
from samebits.verify import OUT_OF_MEMORY

# Two threads that apply to one pipeline must not each place half. Reentrant: a signal handler may remove a handle.
_lock = threading.RLock()

NEVER_CALLED = "never called (a call that torch.compile traces runs diffusers' own lines and is not counted)"
COMPILED = "torch.compile runs this part of the model: its graph is diffusers' own"


@dataclass(frozen=True)
class Row:
    """One site in a report: how many calls its kernel answered, how many eager did, and why.

    A reason may stand there for more calls than ``eager``: calls that the site left to another one, which counts them.
    """

    site: str
    op: str
    fused: int
    eager: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Sentence to number of calls. Zero stands for a reason that holds although no call was counted."""

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON-able dictionary."""
        return {
            "site": self.site,
            "op": self.op,
            "fused": self.fused,
            "eager": self.eager,
            "reasons": dict(self.reasons),
        }


@dataclass(frozen=True)
class Rechecks:
    """What became of the calls of verified signatures that were compared with eager again.

    Attributes
    ----------
    compared : int
        How many comparisons were finished.
    differed : int
        How many of them found other bits, and took a verdict back.
    awaited : int
        How many of the gate's have no answer yet.
    revocations : tuple of Revocation
        The verdicts taken back: site, op, signature, and the first differing element with both values.
    """

    compared: int = 0
    differed: int = 0
    awaited: int = 0
    revocations: tuple[Revocation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The counts, and a dictionary per revocation."""
        revocations = [revocation.to_json() for revocation in self.revocations]
        return {
            "compared": self.compared,
            "differed": self.differed,
            "awaited": self.awaited,
            "revocations": revocations,
        }

    def lines(self) -> list[str]:
        """What a report says about them; nothing where there were none."""
        if not self.compared and not self.awaited:
            return []
        awaited = f" {self.awaited:,} answers are not read yet." if self.awaited else ""
        counts = f"Re-checks: {self.compared:,} verified calls compared again, {self.differed:,} differed.{awaited}"
        return [counts, *map(str, self.revocations)]


@dataclass(frozen=True)
class Report:
    """What happened at every site. ``str()`` is a table; sites that behaved alike share a line.

    Attributes
    ----------
    rows : tuple of Row
        One per site, block by block.
    notes : tuple of str
        What else a reader should know: what ``remove`` had to leave behind, how quantised linears run.
    full : bool
        Whether the table has a line for every site instead.
    graphs : tuple of GraphRow
        One per denoiser whose CUDA graphs are on. A replay runs a site's kernel without being counted at that site.
    rechecks : Rechecks
        What the continuous watch found.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    full: bool = False
    graphs: tuple[GraphRow, ...] = ()
    rechecks: Rechecks = Rechecks()

    def to_json(self) -> list[dict[str, Any]]:
        """One dictionary per site: ``site``, ``op``, ``fused``, ``eager``, ``reasons``."""
        return [row.to_json() for row in self.rows]

    @property
    def summary(self) -> str:
        """One sentence: how many sites and calls went which way."""
        called = sum(1 for row in self.rows if row.fused or row.eager)
        fused, eager = sum(row.fused for row in self.rows), sum(row.eager for row in self.rows)
        return f"{len(self.rows)} sites, {called} of them called: {fused:,} calls fused, {eager:,} eager."

    def __str__(self) -> str:
        cells = [("site", "op", "sites", "fused", "eager", "why")]
        legend: dict[str, int] = {}
        for name, row, count in self._lines():
            why = []
            for sentence, calls in row.reasons.items():
                number = list(legend).index(sentence) + 1 if sentence in legend else len(legend) + 1
                legend[sentence] = legend.get(sentence, 0) + calls
                why.append(f"({number})" if len(row.reasons) == 1 else f"({number}) {calls:,}")
            cells.append((name, row.op, str(count), f"{row.fused:,}", f"{row.eager:,}", ", ".join(why)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = "{:<{}}  {:<{}}  {:>{}}  {:>{}}  {:>{}}  {:<{}}"
        text = [aligned.format(*(part for pair in zip(line, widths, strict=True) for part in pair)) for line in cells]
        for number, (sentence, calls) in enumerate(legend.items(), 1):
            text.append(f"({number}) {sentence}" + (f": {calls:,} calls" if calls else ""))
        table = (line.rstrip() for line in text)
        return "\n".join([*table, *self.notes, self.summary, *self.rechecks.lines(), *map(str, self.graphs)])

    def _lines(self) -> Iterator[tuple[str, Row, int]]:
        """Name, sums and number of sites of every line of the table."""
        groups: dict[Any, list[Row]] = {}
        for row in self.rows:
            kind = row.site if self.full else re.sub(r"(?<![^.])\d+(?![^.])", "*", row.site)
            alike = (kind, row.op, row.fused, row.eager, tuple(row.reasons.items()))
            groups.setdefault(alike, []).append(row)
        for (kind, *_), rows in groups.items():
            first = rows[0]
            sums = {sentence: calls * len(rows) for sentence, calls in first.reasons.items()}
            total = Row(first.site, first.op, first.fused * len(rows), first.eager * len(rows), sums)
            yield (first.site if len(rows) == 1 else kind), total, len(rows)


class Handle:
    """What ``apply`` returns: reads the counters and takes everything off again. Also a context manager.

    Attributes
    ----------
    sites : tuple of Line
        Every site of every denoiser, also those that stay eager.
    models : tuple of torch.nn.Module
        The denoisers it was applied to.
    gate : Gate
        Where its sites ask.
    """

    def __init__(self, models: tuple[nn.Module, ...], options: Mapping[str, Any], gate: Gate) -> None:
        self.models = models
        self.gate = gate
        self.options = dict(options)
        self.sites: tuple[Line, ...] = ()
        self._patches: list[tuple[str, Patch]] = []
        self._graphs: list[DenoiserGraphs] = []
        self._compiled: dict[Line, Callable[[], bool]] = {}
        self._notes: list[str] = []
        self._quantized: list[Fp8Linear] = []
        self._entered = 0

    def _place(self, prefix: str, model: nn.Module, family: Family, gate: Gate) -> None:
        seen: set[int] = set()
        for path, wrapped, replacement in family.places(model, *self._moves(model, family)):
            module = unwrapped(wrapped)
            if id(module) not in seen:
                seen.add(id(module))
                self._stand(prefix + path, module, replacement, gate)
                parents = [model, *_along(model, path)]
                for line in self.sites[-len(replacement.sites) :]:
                    self._compiled[line] = lambda parents=parents: any(map(_is_compiled, parents))  # type: ignore[misc]

    def _moves(self, model: nn.Module, family: Family) -> tuple[str | None, tuple[torch.device, torch.dtype] | None]:
        """How late biases are added on this model, or ``None`` where bits may not move; and for which activations."""
        if self.options["contract"] == "exact":
            return None, None
        decision = self._decide(model, family)
        self._notes.append(f"contract measured, {type(model).__name__}: {decision.reason}.")
        if not decision.allowed:
            return None, None
        return self.options["rounding"], None if self.options["on_trial"] else _where(model)

    def _decide(self, model: nn.Module, family: Family) -> Decision:
        reason = _why_not_measured(model, family)
        if reason is not None:
            return Decision(False, reason)
        if self.options["on_trial"]:
            return Decision(True, "on trial, bits move whatever that does to the pictures")
        place = _place_of(model, self.options["rounding"])
        return decide("measured", place, find_record(settings().cache_dir, place))

    def _place_quantizers(self, prefix: str, model: nn.Module, gate: Gate) -> None:
        """Let a site quantise the inputs of FP8 linears that no kernel before them quantises."""
        for name, module in model.named_modules():
            if type(module) is not Fp8Linear:
                continue
            reason = None if module.input_scale is not None else DYNAMIC
            line = Line(f"{prefix}{name}.input", "quantize_fp8", why_eager=reason)
            self.sites += (line,)
            parents = [model, *_along(model, name)]
            self._compiled[line] = lambda parents=parents: any(map(_is_compiled, parents))  # type: ignore[misc]
            if reason is not None:
                continue
            line.site = self._site(line, gate)
            line.watch = lambda: QUANTISED_BEFORE
            module.__dict__["_quantizer"] = Quantizer(line.site, self)
            self._quantized.append(module)

    def _site(self, line: Line, gate: Gate) -> Any:
        return gate.site(
            line.name,
            by_name(line.op),
            strict=self.options["strict"],
            host=self.options["host"],
            recheck_every=self.options.get("recheck_every"),
        )

    def _stand(self, path: str, module: nn.Module, replacement: Replacement, gate: Gate) -> None:
        reason = replacement.obstacle(module) or obstacle(module)
        lines = {name: Line(f"{path}.{name}".rstrip("."), op, why_eager=reason) for name, op in replacement.sites}
        self.sites += tuple(lines.values())
        if reason is None:
            for line in lines.values():
                line.site = self._site(line, gate)
            patch = Patch(module, lambda original: replacement.write(module, original, lines), owner=self)
            self._patches.append((path, patch))

    def _join_weights(self) -> None:
        """Put the weights together that sites want in one memory; what lies there already stays where it is."""
        moved = [join.take(line.site) for line in self.sites if line.site is not None for join in line.joins]
        if any(moved):
            free_cached_memory()

    def _place_graphs(self, name: str, model: nn.Module, gate: Gate, sites: tuple[Line, ...]) -> None:
        """Let CUDA graphs answer for the whole denoiser, under every hook that it carries."""
        graphs = DenoiserGraphs(
            name or type(model).__name__,
            model,
            _GateView(gate, sites),
            foreign=obstacle,
            max_graphs=self.options["max_graphs"],
            max_bytes=self.options["max_graph_bytes"],
            strict=self.options["strict"],
        )
        reason = obstacle(model)
        if reason is not None:
            self._notes.append(f"no CUDA graphs for {graphs.name}: {reason}.")
            return
        self._graphs.append(graphs)
        self._patches.append((name, Patch(model, graphs.wrap, owner=self)))

    def report(self, *, full: bool = False) -> Report:
        """The counters of every site, as they are now. Works after ``remove`` too.

        Parameters
        ----------
        full : bool
            Print a line for every site. Otherwise sites that behaved alike, block after block, share one.
        """
        rechecks = self._rechecks()  # First, because an answer that arrived may change what the rows say.
        rows, graphs = map(self._row, self.sites), (graphs.row for graphs in self._graphs)
        quantised = [f"{note}." for model in self.models for note in how_linears_run(model)]
        return Report(tuple(rows), (*self._notes, *quantised, *self._tensors()), full, tuple(graphs), rechecks)

    def _tensors(self) -> list[str]:
        """Which sites give tensors that FP8 linears then quantise themselves, and why: a sentence for each reason."""
        if not self.applied:
            return []
        told: Counter[tuple[str, str]] = Counter()
        for line in self.sites:
            reason = None if line.why_tensor is None else line.why_tensor()
            if reason is not None:
                told[line.name.rpartition(".")[2], reason] += 1
        return [
            f"{count} x {name}: FP8 linears quantise its result themselves, because {reason}."
            for (name, reason), count in told.items()
        ]

    def _rechecks(self) -> Rechecks:
        awaited = self.gate.collect()
        counters = [line.site.counters for line in self.sites if line.site is not None]
        return Rechecks(
            sum(counter.rechecked for counter in counters),
            sum(counter.differed for counter in counters),
            awaited,
            tuple(revocation for counter in counters for revocation in counter.revocations),
        )

    def _row(self, line: Line) -> Row:
        if line.site is None:
            return Row(line.name, line.op, 0, 0, {line.why_eager or "": 0})
        counters = line.site.counters
        # Copied at once: other threads may be counting.
        declined, passed_on = Counter(dict(line.declined)), Counter(dict(line.passed_on))
        reasons = dict(Counter(dict(counters.reasons)) + declined + passed_on)
        eager = counters.eager + sum(declined.values())
        if not counters.fused and not eager and not passed_on:
            ahead = COMPILED if self._compiled[line]() else line.watch() if line.watch is not None else None
            reasons = {ahead or NEVER_CALLED: 0}
        return Row(line.name, line.op, counters.fused, eager, reasons)

    @property
    def moved(self) -> int:
        """How many calls added a linear's bias late, fused or eager: the calls whose bits were moved on purpose."""
        late = (line.site.counters for line in self.sites if line.site is not None and line.op in _MOVERS)
        return sum(counters.fused + counters.eager for counters in late)

    @property
    def applied(self) -> bool:
        """Whether the forwards are in place; false after ``remove``."""
        return bool(self._patches)

    def remove(self) -> None:
        """Put every forward back as it was and free all CUDA graphs. A second call does nothing.

        Weights that were put side by side stay where they are, as a CUDA graph captured by somebody may read them:
        the same parameters with the same values.

        Hooks that were there before stay; so do hooks that came later. Where a wrapper that samebits does not
        know still holds one of our forwards, that forward only passes on to the original from now on, and the
        report says so.
        """
        with _lock:
            while self._patches:
                path, patch = self._patches.pop()
                left = patch.undo()
                if left is not None:
                    self._notes.append(f"{path}: {left}.")
            while self._quantized:
                attributes = self._quantized.pop().__dict__
                placed = attributes.get("_quantizer")
                if placed is not None and placed.owner is self:
                    del attributes["_quantizer"]
        for graphs in self._graphs:  # These have locks of their own.
            graphs.close()
        self.gate.flush()

    def __enter__(self) -> Handle:
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:  # Applied again inside, it is the same handle: the outermost block takes it off.
            self.remove()

    def __repr__(self) -> str:
        return f"<samebits.Handle: {len(self.sites)} sites, {'applied' if self.applied else 'not applied'}>"


class _GateView:
    """What the graphs of one denoiser ask about the gate and about the sites inside."""

    def __init__(self, gate: Gate, lines: tuple[Line, ...]) -> None:
        self._gate = gate
        self._lines = lines

    def stopped(self) -> str | None:
        return self._gate.stopped

    def withdrawn(self) -> int:
        return self._gate.withdrawn

    def unsettled(self) -> int:
        return sum(
            calls
            for line in self._lines
            if line.site is not None
            for reason, calls in list(line.site.counters.reasons.items())
            if reason in (AWAITED, CAPTURING, ELSEWHERE, HINTED, OUT_OF_MEMORY) or reason.startswith(RETRY)
        )


def apply(
    target: Any,
    *,
    strict: bool = False,
    host: bool = False,
    cuda_graphs: bool = False,
    max_graphs: int = MAX_GRAPHS,
    max_graph_bytes: int | None = None,
    recheck_every: int | None = None,
    contract: str = "exact",
    rounding: str = "eager",
    on_trial: bool = False,
    trust: str | None = "settings",
    gate: Gate | None = None,
) -> Handle:
    """Let samebits answer for the sites of a pipeline's denoisers, or of one denoiser.

    Only these instances change, nothing of diffusers does; ``handle.remove()`` takes everything back. The weights of
    query, key and value of every attention are moved into one memory each, once: a CUDA graph captured before must
    be captured again, as after ``.to()``. Applying again to what is applied already, with the same options, joins
    weights that were moved to the GPU since, and returns the same handle; of ``with`` blocks inside one
    another the outermost takes it off.

    Parameters
    ----------
    target : DiffusionPipeline or torch.nn.Module
        A pipeline, of which every component of a known family is taken, or such a transformer itself.
    strict : bool
        Raise on any fault of ours instead of going on with eager's result. For tests.
    host : bool
        Send CPU tensors through the gate with the kernels' own source compiled for the CPU.
    cuda_graphs : bool
        Capture each denoiser as a CUDA graph per kind of arguments, once its ops are verified for them, and replay
        that. A call for which no graph may stand is made plainly; the report says how many and why. See docs/graphs.md.
    max_graphs : int
        How many graphs a denoiser may have; the one that was not used for longest goes first.
    max_graph_bytes : int, optional
        How much memory the graphs of a denoiser may hold together; by default a quarter of the device's.
    recheck_every : int, optional
        Make one verified call of a site in this many both ways again, on average, and take the verdict back where the
        bits differ; 0 for none. By default what the gate says, which has it from ``SAMEBITS_RECHECK_EVERY``. See
        docs/gate.md.
    contract : str
        ``"exact"``: eager's bits. ``"measured"``: the output biases of quantised linears may be added by the kernel
        after them, which moves bits, where a record of ``samebits quality`` for this model on this machine allows it;
        else everything stays exact, and the report says why. See docs/quant.md.
    rounding : str
        How such a bias is added: ``"eager"``, rounded as three eager kernels do, or ``"fma"``, by one multiply-add.
    on_trial : bool
        Move the bits without a record, as ``samebits quality`` does to make one. Only with ``contract="measured"``.
    trust : {"settings", "hint", "stored", "anew"} or None
        What the gate makes of verdicts that are stored on this machine, from now on and for everybody who asks it.
        ``"hint"``: they save time, and are checked at the first call of each signature. ``"stored"``: they are
        believed, for servers that were warmed in the same environment. ``"anew"``: everything is verified anew, and
        kept. ``None``: nothing is asked for or kept. ``"settings"``: as the gate has it; the process-wide one has it
        from ``SAMEBITS_CERTIFICATES``, which is ``hint`` unless set. See docs/gate.md and docs/certificates.md.
    gate : Gate, optional
        The gate to ask; the process-wide one by default, so that verdicts are shared.

    Raises
    ------
    UnsupportedModelError
        There is no denoiser of a known family in ``target``.
    AlreadyAppliedError
        A part of ``target`` is applied already, with other options, another gate or together with other models.
    ValueError
        A limit of graphs that allows none, a negative ``recheck_every``, or another ``trust``.
    """
    for limit, value in (("max_graphs", max_graphs), ("max_graph_bytes", max_graph_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"{limit} must be at least 1, got {value}; leave cuda_graphs out to have no graphs.")
    if trust is not None and trust not in ("settings", *TRUSTS):
        raise ValueError(f"trust must be None or one of settings, {', '.join(TRUSTS)}, got {trust!r}.")
    if recheck_every is not None:
        checked_recheck_every(recheck_every)
    for option, choice, choices in (("contract", contract, CONTRACTS), ("rounding", rounding, ROUNDINGS)):
        if choice not in choices:
            raise ValueError(f"{option} must be one of {', '.join(choices)}, got {choice!r}.")
    if on_trial and contract != "measured":
        raise ValueError('on_trial moves bits, so it goes with contract="measured" only.')
    found = _denoisers(target)
    options: dict[str, Any] = {"strict": strict, "host": host, "cuda_graphs": cuda_graphs, "contract": contract}
    options |= {"rounding": rounding, "on_trial": on_trial} if contract == "measured" else {}
    if cuda_graphs:
        options |= {"max_graphs": max_graphs, "max_graph_bytes": max_graph_bytes}
    if recheck_every is not None:
        options["recheck_every"] = recheck_every
    if trust != "settings":
        options["trust"] = trust
    gate = gate or default_gate()
    with _lock:
        return _apply(found, options, gate)


def _apply(found: list[tuple[str, nn.Module, Family]], options: dict[str, Any], gate: Gate) -> Handle:
    """Return the handle that stands for exactly this already, or place everything."""
    models = tuple(model for _, model, _ in found)
    handles = {id(owner): owner for _, model, family in found if (owner := _owner(model, family)) is not None}
    for handle in handles.values():
        same = {id(model) for model in handle.models} == {id(model) for model in models}
        if same and handle.options == options and handle.gate is gate:
            handle._join_weights()  # they may have been moved to the GPU meanwhile
            return handle
        raise AlreadyAppliedError(options=", ".join(f"{name}={value}" for name, value in handle.options.items()))
    if "trust" in options:
        trust = options["trust"]
        gate.use(None if trust is None else default_store(), trust or "hint")
    handle = Handle(models, options, gate)
    try:
        for name, model, family in found:
            before = len(handle.sites)
            prefix = f"{name}." if len(found) > 1 else ""
            handle._place(prefix, model, family, gate)
            handle._place_quantizers(prefix, model, gate)
            if options["cuda_graphs"]:
                handle._place_graphs(name, model, gate, handle.sites[before:])
        handle._join_weights()
    except BaseException:
        handle.remove()
        raise
    return handle


def _denoisers(target: Any) -> list[tuple[str, nn.Module, Family]]:
    """Name, module and family of every denoiser in ``target``."""
    components = {"": target} if isinstance(target, nn.Module) else getattr(target, "components", None)
    found: dict[int, tuple[str, nn.Module, Family]] = {}
    for name, component in (components if isinstance(components, Mapping) else {}).items():
        family = family_of(component)
        if family is not None:
            found.setdefault(id(unwrapped(component)), (name, unwrapped(component), family))
    if not found:
        known = ", ".join(family.model.__name__ for family in FAMILIES)
        raise UnsupportedModelError(got=type(target).__name__, families=known)
    return list(found.values())


def _owner(model: nn.Module, family: Family) -> Handle | None:
    """The handle that is applied to this model already, if any."""
    for module in (model, *(module for _, module, _ in family.places(model))):
        placed = find(unwrapped(module))
        if placed is not None and isinstance(placed.owner, Handle):
            return placed.owner
    return None


ROUNDINGS = ("eager", "fma")
DYNAMIC = "the scale of its input is found from each input, which no kernel of ours does"
QUANTISED_BEFORE = "its input comes quantised, from the kernel before it"
_MOVERS = ("bias_gated_residual", "bias_gated_residual_norm_modulate")


def why_nothing_moves(target: Any) -> str | None:
    """Why no bits of the first denoiser of ``target`` can move, whatever was measured: a sentence, or ``None``."""
    _, model, family = _denoisers(target)[0]
    return _why_not_measured(model, family)


def place_of(target: Any, rounding: str = "eager") -> Place:
    """Where a quality record for the denoiser of ``target`` holds. It hashes all of its weights.

    Raises
    ------
    UnsupportedModelError
        There is no denoiser of a known family in ``target``.
    """
    return _place_of(_denoisers(target)[0][1], rounding)


def _why_not_measured(model: nn.Module, family: Family) -> str | None:
    """Why no bits of this model can move, whatever was measured: a sentence, or ``None``."""
    if scheme_of(model) is None:
        return decide("measured", Place("", None, "", "", None), None).reason
    if not family.defers:
        return f"samebits adds no bias of a {type(model).__name__} late"
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return "some of its weights are not in memory (offloaded), so that no record can be looked up by them"
    return None


def _where(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model's first weights are, and the dtype of its activations."""
    return next((p.device, p.dtype) for p in model.parameters() if p.dtype.is_floating_point)


def _place_of(model: nn.Module, rounding: str) -> Place:
    device, dtype = _where(model)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Place(
        model_hash=model_hash(model),
        quantization=scheme_of(model),
        rounding=rounding,
        dtype=str(dtype).removeprefix("torch."),
        capability=capability,
        environment=fingerprint(device.index),
        sources={name: by_name(name).source_hash for name in _MOVERS},
    )


def _along(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules on the way from the model to the one at ``path``, both ends but the model's included."""
    module: Any = model
    for name in path.split("."):
        module = module._modules[name]
        yield module
        module = unwrapped(module)


def _is_compiled(module: nn.Module) -> bool:
    return unwrapped(module) is not module or module.__dict__.get("_compiled_call_impl") is not None


def _after_fork_in_child() -> None:
    """Whoever held the lock stayed in the parent."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
