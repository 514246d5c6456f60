"""The parameters of a kernel, read from its source, and the checks of what is handed to them.

CUDA's launch takes untyped addresses: a Python float that travels as a ``double`` into a ``float`` parameter is no
error, the kernel reads its low four bytes and one of a few hundred thousand results is another one. So nothing is
launched here whose C type was not read from the kernel's own text and checked in Python first.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samebits.errors import CompileError, KernelArgumentError

_INTEGERS: dict[str, tuple[int, bool]] = {
    "int8": (1, True),
    "uint8": (1, False),
    "int16": (2, True),
    "uint16": (2, False),
    "int32": (4, True),
    "uint32": (4, False),
    "int64": (8, True),
    "uint64": (8, False),
}
"""Bytes and signedness of the integer types."""

_FLOATS = {"float32": ("<f", 4), "float64": ("<d", 8)}

_SPELLINGS = {
    "bool": "bool",
    "signed char": "int8",
    "int8_t": "int8",
    "unsigned char": "uint8",
    "uint8_t": "uint8",
    "short": "int16",
    "int16_t": "int16",
    "unsigned short": "uint16",
    "uint16_t": "uint16",
    "int": "int32",
    "int32_t": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "long long": "int64",
    "int64_t": "int64",
    "unsigned long long": "uint64",
    "uint64_t": "uint64",
    "size_t": "uint64",
    "float": "float32",
    "double": "float64",
    "TensorMap": "tensor_map",
}
"""C spelling to our name. ``long`` is missing on purpose: its width depends on the platform."""

_GIVEN_AT_LAUNCH = {"pointer": 8, "tensor_map": 128}
"""Bytes of the kinds that a call hands in, as an address: of the memory itself, or of a map of it on the host."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes
    ----------
    name : str
    c_type : str
        As the source spells it, macros resolved: ``const __nv_bfloat16*``, ``long long``.
    kind : str
        ``pointer``, ``tensor_map``, ``bool``, ``int8`` to ``uint64``, ``float32`` or ``float64``.
    """

    name: str
    c_type: str
    kind: str

    @property
    def is_given_at_launch(self) -> bool:
        """Whether a call hands it in; everything else is decided when the kernel is bound."""
        return self.kind in _GIVEN_AT_LAUNCH

    @property
    def bytes(self) -> int:
        """How many bytes the kernel reads for this parameter."""
        if self.kind in _GIVEN_AT_LAUNCH:
            return _GIVEN_AT_LAUNCH[self.kind]
        if self.kind == "bool":
            return 1
        return _INTEGERS[self.kind][0] if self.kind in _INTEGERS else _FLOATS[self.kind][1]

    def slot(self, kernel: str, value: Any) -> int:
        """The value as a signed 64-bit integer whose lowest bytes are exactly what the kernel reads.

        Parameters
        ----------
        kernel : str
            The kernel's name, for the message.
        value : int, float or bool
            An integer type takes integers (NumPy's too) in its range, never a bool or a float. ``float`` and
            ``double`` take a Python or NumPy float, never an integer; ``float`` rounds it to nearest, as C does.
            ``bool`` takes a bool.

        Raises
        ------
        KernelArgumentError
            The value does not fit the C type.
        """
        if self.is_given_at_launch:
            raise self._error(kernel, f"given at the launch, not here: it is a {self.kind}", value)
        if self.kind == "bool":
            if not isinstance(value, bool):
                raise self._error(kernel, "True or False", value)
            return int(value)
        if self.kind in _INTEGERS:
            return self._integer_slot(kernel, value)
        return self._float_slot(kernel, value)

    def _integer_slot(self, kernel: str, value: Any) -> int:
        size, signed = _INTEGERS[self.kind]
        low, high = (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) if signed else (0, (1 << 8 * size) - 1)
        expected = f"an integer from {low} to {high}"
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise self._error(kernel, expected, value)
        try:
            number = operator.index(value)
        except TypeError:  # NumPy's arrays and torch's tensors have the method and refuse it
            raise self._error(kernel, expected, value) from None
        if not low <= number <= high:
            raise self._error(kernel, expected, value)
        return number - (1 << 64) if number >= 1 << 63 else number

    def _float_slot(self, kernel: str, value: Any) -> int:
        # numpy.float64 is a float; numpy.float32 and float16 are not, but convert without loss.
        if not isinstance(value, float) and type(value).__name__ not in ("float32", "float16"):
            raise self._error(kernel, "a float (an integer is written 1.0)", value)
        code, _ = _FLOATS[self.kind]
        try:
            packed = struct.pack(code, float(value))
        except OverflowError:
            raise self._error(kernel, "within the range of a 32-bit float", value) from None
        return int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True)

    def _error(self, kernel: str, expected: str, value: Any) -> KernelArgumentError:
        return KernelArgumentError(
            kernel=kernel,
            argument=self.name,
            expected=f"{expected}, because the source declares `{self.c_type} {self.name}`",
            got=f"{value!r} of type {type(value).__name__}",
        )


def strip_comments(text: str) -> str:
    """The text with every comment replaced by a blank, so that no pattern matches inside one."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda match: match[0] if match[0].startswith('"') else " ", text, flags=re.DOTALL)


_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\b')


def kernel_names(text: str) -> tuple[str, ...]:
    """The names of all ``extern "C" __global__`` functions of a source, in order."""
    return tuple(name for name, _ in _declarations(strip_comments(text)))


def parse_parameters(text: str, name: str, constants: Mapping[str, int | str]) -> tuple[Parameter, ...]:
    """Read the parameter list of one kernel.

    Parameters
    ----------
    text : str
        The source of the ``.cu`` file.
    name : str
        The kernel, declared as ``extern "C" __global__ void name(...)``.
    constants : mapping
        The macros it is compiled with; a parameter type may be one of them.

    Raises
    ------
    CompileError
        There is no such kernel, or a parameter has a type that cannot be checked.
    """
    declared = dict(_declarations(strip_comments(text)))
    if name not in declared:
        names = ", ".join(declared) or "none"
        raise CompileError(f'the source declares no extern "C" __global__ kernel {name!r}; it has: {names}.')
    pieces = [piece.strip() for piece in declared[name].split(",")]
    if pieces in ([""], ["void"]):
        return ()
    return tuple(_parameter(name, piece, constants) for piece in pieces)


def _declarations(text: str) -> Iterable[tuple[str, str]]:
    """Yield the name and the text between the parentheses of every kernel."""
    for start in _KERNEL.finditer(text):
        rest = text[start.end() :].lstrip()
        while attribute := re.match(r"__(?:launch_bounds|cluster_dims)__\s*\(", rest):
            rest = rest[_closing(rest, attribute.end()) + 1 :].lstrip()
        head = re.match(r"(\w+)\s*\(", rest)
        if head:
            yield head[1], rest[head.end() : _closing(rest, head.end())]


def _closing(text: str, start: int) -> int:
    """The index of the parenthesis that closes the one before ``start``."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _parameter(kernel: str, text: str, constants: Mapping[str, int | str]) -> Parameter:
    plain = re.sub(r"\b__restrict__\b|\b__grid_constant__\b", " ", text)
    match = re.fullmatch(r"(.*[\s*])(\w+)", plain.strip(), flags=re.DOTALL)
    if not match or "#" in text:
        raise CompileError(f"kernel {kernel}: the parameter `{text}` cannot be read: write it as `type name`.")
    words = re.sub(r"\w+", lambda word: str(constants.get(word[0], word[0])), match[1])
    c_type = re.sub(r"\s*\*", "*", " ".join(words.split()))
    if re.search(r"\*( const)?$", c_type):
        return Parameter(match[2], c_type, "pointer")
    value_type = re.sub(r"\bconst\b", " ", c_type)
    kind = _SPELLINGS.get(" ".join(value_type.split()))
    if kind is None:
        raise CompileError(
            f"kernel {kernel}: the type of `{text}` cannot be checked: expected a pointer or one of "
            f"{', '.join(_SPELLINGS)}."
        )
    return Parameter(match[2], c_type, kind)


def pack_scalars(kernel: str, parameters: tuple[Parameter, ...], scalars: Mapping[str, Any]) -> dict[str, int]:
    """Check every scalar argument against its C type and return the slot of each, by name.

    Raises
    ------
    KernelArgumentError
        A value does not fit, a scalar is missing, or a name is not a scalar parameter of the kernel.
    """
    wanted = [parameter for parameter in parameters if not parameter.is_given_at_launch]
    names = {parameter.name for parameter in parameters}
    listing = ", ".join(f"{parameter.c_type} {parameter.name}" for parameter in wanted) or "no scalars"
    for name in scalars:
        if name not in names:
            raise KernelArgumentError(f"kernel {kernel}: there is no parameter {name!r}; its scalars are: {listing}.")
    slots = {}
    for parameter in parameters:
        if parameter.name in scalars:
            slots[parameter.name] = parameter.slot(kernel, scalars[parameter.name])
    missing = [parameter.name for parameter in wanted if parameter.name not in slots]
    if missing:
        raise KernelArgumentError(
            f"kernel {kernel}: no value was given for {', '.join(missing)}; its scalars are: {listing}."
        )
    return slots
