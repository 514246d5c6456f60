"""What one forward launched, in the order of the launches, each with the operator and the block that it came from.

The profiler's own trace file is read: its format is public and the same for every release. A kernel is tied to the
host's call that launched it by their correlation number; what was open on the host at that moment, operators and
our ranges around blocks and sites, says where it came from. This holds for every launch, also for one past torch.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.bench.floor import kind_of
from samebits.bench.launches import keep_cupti

BLOCK_MARK = "samebits block: "
SITE_MARK = "samebits site: "
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
# Operators that compute nothing: they make a view, look something up, or take memory.
_IDLE = re.compile(
    r"aten::(alias|as_strided|chunk|detach|dropout|empty|empty_like|empty_strided|expand|flatten|item|is_nonzero"
    r"|lift_fresh|narrow|permute|resize_|resolve_conj|resolve_neg|result_type|reshape|select|set_|slice|split"
    r"|split_with_sizes|squeeze|t|to|transpose|type_as|unbind|unflatten|unsqueeze|view|view_as_complex|view_as_real"
    r"|_unsafe_view|_reshape_alias|_local_scalar_dense)"
)


@dataclass(frozen=True)
class Launch:
    """One thing that the GPU did, or on a CPU one operator that calls no other.

    Attributes
    ----------
    name : str
        The kernel's name, or the operator's on a CPU.
    us : float
        How long it ran, in microseconds.
    operator : str
        The innermost operator that was open when it was launched; empty if none was.
    block : str
        The module whose forward was running, for example ``layers.3``; empty outside of every block.
    site : str
        The site that was called, for example ``layers.3.ffn_norm1 (rms_norm_scale)``; empty outside of every site.
    """

    name: str
    us: float
    operator: str = ""
    block: str = ""
    site: str = ""


def launches_in(events: Iterable[Mapping[str, Any]]) -> list[Launch]:
    """Read the launches out of the events of a trace.

    Parameters
    ----------
    events : iterable of mapping
        ``traceEvents`` of a Chrome trace: complete events (``"ph": "X"``) with ``cat``, ``name``, ``ts`` and ``dur``
        in microseconds, and the ``correlation`` among ``args``.

    Returns
    -------
    list of Launch
        Kernels, copies and memsets in the order in which the GPU ran them; where there are none at all, the operators
        that call no other.
    """
    whole = [event for event in events if event.get("ph") == "X" and "ts" in event]
    spans = [
        event
        for event in whole
        if event.get("cat") == "cpu_op" or str(event.get("name", "")).startswith((BLOCK_MARK, SITE_MARK))
    ]
    spans = [span for span in spans if not str(span.get("cat", "")).startswith("gpu_")]
    device = [event for event in whole if event.get("cat") in _ON_DEVICE]
    if not device:
        return _leaves(spans)
    when = {
        event["args"]["correlation"]: float(event["ts"])
        for event in whole
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    # In the device's order, which for the one stream of a forward is the order of the launches.
    device.sort(key=lambda event: float(event["ts"]))
    moments = [when.get(event.get("args", {}).get("correlation")) for event in device]
    known = sorted({moment for moment in moments if moment is not None})
    opened = dict(zip(known, _open_at(known, spans), strict=True))
    found: list[Launch] = []
    for event, moment in zip(device, moments, strict=True):
        name, us = str(event["name"]), float(event.get("dur", 0.0))
        if moment is not None:
            found.append(_launch(name, us, opened[moment]))
        else:  # the host's side was not recorded: it stands in the block of the launch before it
            found.append(Launch(name, us, block=found[-1].block if found else ""))
    return found


def _open_at(moments: Sequence[float], spans: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """For each moment, in ascending order, the spans open then, outermost first. Spans nest or follow each other."""
    ordered = sorted(spans, key=lambda span: (float(span["ts"]), -float(span.get("dur", 0.0))))
    open_spans: list[Mapping[str, Any]] = []
    following = 0
    for moment in moments:
        while following < len(ordered) and float(ordered[following]["ts"]) <= moment:
            span = ordered[following]
            while open_spans and _end(open_spans[-1]) <= float(span["ts"]):  # one that follows, not one inside
                open_spans.pop()
            open_spans.append(span)
            following += 1
        while open_spans and _end(open_spans[-1]) < moment:
            open_spans.pop()
        yield list(open_spans)


def _end(span: Mapping[str, Any]) -> float:
    return float(span["ts"]) + float(span.get("dur", 0.0))


def _launch(name: str, us: float, open_spans: Iterable[Mapping[str, Any]]) -> Launch:
    operator = block = site = ""
    for span in open_spans:
        text = str(span["name"])
        if text.startswith(BLOCK_MARK):
            block = text.removeprefix(BLOCK_MARK)
        elif text.startswith(SITE_MARK):
            site = text.removeprefix(SITE_MARK)
        else:
            operator = text
    return Launch(name, us, operator, block, site)


def _leaves(spans: Sequence[Mapping[str, Any]]) -> list[Launch]:
    """The operators that call no other operator, where there is no device: the nearest thing to a launch."""
    ordered = sorted(spans, key=lambda span: (float(span["ts"]), -float(span.get("dur", 0.0))))
    operators: list[Mapping[str, Any]] = []
    inside_until = float("-inf")
    for span in ordered:
        name = str(span["name"])
        if span.get("cat") != "cpu_op" or _IDLE.fullmatch(name) or float(span["ts"]) < inside_until:
            continue
        operators.append(span)
        if kind_of(name) is not None:  # one whole, whatever it calls
            inside_until = _end(span)
    leaves = [
        span
        for span, following in zip(operators, [*operators[1:], None], strict=True)
        if following is None or float(following["ts"]) >= _end(span)
    ]
    moments = [float(span["ts"]) for span in leaves]
    return [
        _launch(str(span["name"]), float(span.get("dur", 0.0)), open_spans)
        for span, open_spans in zip(leaves, _open_at(moments, spans), strict=True)
    ]


@contextmanager
def marked(blocks: Mapping[str, Any]) -> Iterator[None]:
    """Put a range around the forward of every block while the context is open.

    Parameters
    ----------
    blocks : mapping of str to torch.nn.Module
        By path. Only blocks: a hook on a norm would make the site that stands for it step aside.
    """
    from torch.autograd.profiler import record_function

    with ExitStack() as undo:
        for path, block in blocks.items():
            running: list[Any] = []

            def enter(*_: Any, path: str = path, running: list[Any] = running) -> None:
                running.append(record_function(BLOCK_MARK + path))
                running[-1].__enter__()

            def leave(*_: Any, running: list[Any] = running) -> None:
                running.pop().__exit__(None, None, None)

            # Else a block would not do the next one's first lines ahead, and another program would be profiled.
            enter.only_looks = leave.only_looks = True  # type: ignore[attr-defined]
            undo.callback(block.register_forward_pre_hook(enter).remove)
            undo.callback(block.register_forward_hook(leave).remove)
        yield


def record(body: Callable[[], object], blocks: Mapping[str, Any], cuda: bool) -> list[Launch]:
    """Run ``body`` once outside and once under the profiler; what the second run launched.

    ``body`` should have run before: a first run compiles, allocates and verifies.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    keep_cupti()
    with marked(blocks), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        # The profiler warns about its own event buffers from one version to the next; none of it is about us.
        warnings.simplefilter("ignore")
        body()
        wait()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
            body()
            wait()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found = launches_in(events)
    if cuda and not any(event.get("cat") in _ON_DEVICE for event in events):
        raise RuntimeError("the profiler's trace holds no kernel; is another profiler attached to the GPU?")
    return found
