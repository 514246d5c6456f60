"""What a family is made of: the forwards it stands for, the sites in them, and when a site may run.

A family never trusts a name. It writes a forward anew only for the exact class and the exact source text that
it was written against, and a site takes over a submodule's call only while that submodule is exactly what the
op reproduces: a plain norm with nothing hooked onto it. Everything else keeps diffusers' own lines, and the
report says why.
"""

from __future__ import annotations

import hashlib
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from diffusers.utils import is_torch_npu_available
from torch import nn

from samebits.modules import calls_only_forward as calls_only_forward

Function = Callable[..., Any]


class Join(Protocol):
    """Weights that a site wants in one memory."""

    def take(self, site: Any) -> bool:
        """Put them there where nothing speaks against it, and say whether memory was moved."""
        ...


REASONS_LIMIT = 64
"""Different reasons that a line counts by name; the rest are counted together."""
OTHER_REASONS = "other reasons"


class Reasons(Counter[str]):
    """Calls by reason. A sentence may hold a number that never comes twice, such as the tokens of a prompt."""

    def __setitem__(self, reason: str, calls: int) -> None:
        if len(self) >= REASONS_LIMIT and reason not in self:
            reason, calls = OTHER_REASONS, self[OTHER_REASONS] + calls
        super().__setitem__(reason, calls)


class Line:
    """One site of one model: the line of a forward for which an op stands.

    Attributes
    ----------
    name : str
        Where it is, for example ``transformer_blocks.0.img_norm1``.
    op : str
        The name of its op.
    site : callable or None
        The gate's site, called with the positional arguments of the op's reference; ``None`` where the forward
        around it was not written anew.
    why_eager : str or None
        Why ``site`` is ``None``.
    declined : Reasons
        Calls that kept diffusers' own lines before the gate was asked, by reason.
    passed_on : Reasons
        Calls whose lines ran at another site of ours instead, by reason: nobody's eager calls.
    joins : tuple of Join
        What ``samebits.apply`` puts together for this site once every forward is in place.
    why_tensor : callable or None
        Says why the site gives a tensor although quantised linears read it, or returns ``None``.
    """

    __slots__ = ("declined", "joins", "name", "op", "passed_on", "site", "watch", "why_eager", "why_tensor")

    def __init__(self, name: str, op: str, site: Any = None, why_eager: str | None = None) -> None:
        self.name = name
        self.op = op
        self.site = site
        self.why_eager = why_eager
        self.declined = Reasons()
        self.passed_on = Reasons()
        self.joins: tuple[Join, ...] = ()
        self.watch: Callable[[], str | None] | None = None
        """Says why the next call would keep diffusers' own lines; for a report before the first call."""
        self.why_tensor: Callable[[], str | None] | None = None

    def __repr__(self) -> str:
        return f"Line({self.name!r}, {self.op!r})"


class Known(Protocol):
    """A function that must be the known one for a replacement to be right."""

    def obstacle(self) -> str | None:
        """Why it is not the known one: a sentence, or ``None`` if it is."""
        ...


@dataclass(frozen=True)
class Source:
    """A function of diffusers whose lines a family stands for, known by the SHA-256 of its source text."""

    owner: type | types.ModuleType
    name: str
    sha256: frozenset[str]

    def obstacle(self) -> str | None:
        """Why this function is not the known one: a sentence, or ``None`` if it is.

        The text is read from the code object that would run, so a function that was swapped on the class, even
        one that poses as the original through ``functools.wraps``, is not mistaken for it.
        """
        function = inspect.getattr_static(self.owner, self.name, None)
        if isinstance(function, types.FunctionType):
            digest = _source_sha256(function.__code__)
            if digest in self.sha256:
                return None
        owner = self.owner.__name__.rpartition(".")[2]
        return (
            f"the source of {owner}.{self.name} is not the one samebits was written against "
            "(diffusers 0.42.0 and 0.42.1)"
        )


@lru_cache(maxsize=256)
def _source_sha256(code: types.CodeType) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
    except (OSError, TypeError):  # no source at hand: typed into an interpreter, or shipped as bytecode only
        return None


def source(owner: type | types.ModuleType, name: str, *sha256: str) -> Source:
    """A known function: the class or module it is in, its name there, the SHA-256 of every text it may have."""
    return Source(owner, name, frozenset(sha256))


@dataclass(frozen=True)
class TorchForward:
    """The forward of one of torch's modules, a line or two. Known by the names in it, over all torch versions."""

    owner: type[nn.Module]
    names: tuple[str, ...]
    """The global names and attributes that it uses, then its parameters and local variables."""

    def obstacle(self) -> str | None:
        """A sentence where the function on the class is another one, or ``None``."""
        function = inspect.getattr_static(self.owner, "forward", None)
        if isinstance(function, types.FunctionType):
            code = function.__code__
            if (*code.co_names, *code.co_varnames) == self.names:
                return None
        return f"torch.nn.{self.owner.__name__}.forward was replaced by another function"


@dataclass(frozen=True)
class Replacement:
    """A forward that a family writes anew, and the sites in it."""

    of: type[nn.Module]
    """The exact class; a subclass may have changed anything."""
    sources: tuple[Known, ...]
    """Every function whose lines the written forward stands for."""
    sites: tuple[tuple[str, str], ...]
    """Pairs of the site's name within the module and its op's name."""
    write: Callable[[Any, Function, Mapping[str, Line]], Function]
    """``write(module, original, lines)`` returns the function to run instead of ``original``."""

    def obstacle(self, module: nn.Module) -> str | None:
        """Why ``module`` must keep its own forward: a sentence, or ``None``."""
        if type(module) is not self.of:
            return f"its class is {type(module).__name__}, samebits knows exactly {self.of.__name__}"
        for known in self.sources:
            reason = known.obstacle()
            if reason is not None:
                return reason
        if is_torch_npu_available():
            return "torch_npu is installed, with which diffusers' RMSNorm is another function"
        return None


@dataclass(frozen=True)
class Family:
    """One diffusers architecture: its class and which forwards of it are written anew."""

    name: str
    model: type[nn.Module]
    places: Callable[..., Iterator[tuple[str, nn.Module, Replacement]]]
    """``places(model)`` yields path, module and replacement, block by block.

    ``places(model, rounding, where)`` with ``"eager"`` or ``"fma"`` also has the sites that take in a linear's bias
    late, for activations on the device and of the dtype of ``where`` alone unless that is ``None``."""
    defers: bool = False
    """Whether there are such sites."""


def unwrapped(module: Any) -> Any:
    """The module inside ``torch.compile(module)``, or the module itself."""
    inner = module._modules.get("_orig_mod") if isinstance(module, nn.Module) else None
    return module if inner is None else inner
