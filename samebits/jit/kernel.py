"""What both toolchains share: a compiled kernel, and the same kernel with everything but the pointers decided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from samebits.errors import KernelArgumentError
from samebits.jit.signature import Parameter, pack_scalars

Dimensions = tuple[int, int, int]

_GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_THREADS_LIMIT = 1024


class Kernel(ABC):
    """A kernel compiled for one architecture and one set of constants. Made by :func:`samebits.jit.compile`.

    Attributes
    ----------
    name : str
    parameters : tuple of Parameter
        In the source's order, read from its text.
    """

    def __init__(self, name: str, parameters: tuple[Parameter, ...]) -> None:
        self.name = name
        self.parameters = parameters

    def bind(self, grid: Dimensions, block: Dimensions, shared_bytes: int = 0, /, **scalars: Any) -> BoundKernel:
        """Decide everything about a launch but its pointers.

        Parameters
        ----------
        grid, block : tuple of int
            Blocks in a grid and threads in a block, each ``(x, y, z)``.
        shared_bytes : int
            Dynamic shared memory of a block.
        **scalars
            Every parameter of the kernel that is no pointer, by name.

        Raises
        ------
        KernelArgumentError
            A scalar is missing, unknown or does not fit its C type, or a dimension is out of range.
        LaunchError
            The device has less shared memory than a block asks for.
        CompileInCaptureError
            A CUDA graph is being captured and the kernel is not loaded yet.
        """
        self._check_dimensions("grid", grid, _GRID_LIMITS)
        self._check_dimensions("block", block, _BLOCK_LIMITS)
        threads = block[0] * block[1] * block[2]
        if threads > _THREADS_LIMIT:
            raise self._error("block", f"at most {_THREADS_LIMIT} threads", f"{block}, which is {threads}")
        if type(shared_bytes) is not int or not 0 <= shared_bytes < 1 << 31:
            raise self._error("shared_bytes", "a number of bytes", repr(shared_bytes))
        slots = pack_scalars(self.name, self.parameters, scalars)
        template = tuple(slots.get(parameter.name) for parameter in self.parameters)
        return self._bind(grid, block, shared_bytes, template)

    def load(self, device_index: int, shared_bytes: int = 0) -> None:
        """Make a device ready for launches with this much dynamic shared memory. Nothing to do on the CPU."""
        return

    @abstractmethod
    def _bind(
        self, grid: Dimensions, block: Dimensions, shared_bytes: int, template: tuple[int | None, ...]
    ) -> BoundKernel:
        """Bind checked arguments. ``template`` holds a slot per parameter, ``None`` where a pointer goes."""

    def _check_dimensions(self, which: str, value: Dimensions, limits: Dimensions) -> None:
        if (
            not isinstance(value, tuple)
            or len(value) != 3
            or any(type(size) is not int or not 1 <= size <= limit for size, limit in zip(value, limits, strict=True))
        ):
            raise self._error(which, f"three ints from 1 to {limits}", repr(value))

    def _error(self, argument: str, expected: str, got: str) -> KernelArgumentError:
        return KernelArgumentError(kernel=self.name, argument=argument, expected=expected, got=got)


class BoundKernel(ABC):
    """A kernel that only lacks its pointers.

    Parameters
    ----------
    name : str
    template : tuple of int or None
        A slot per parameter, ``None`` where a pointer goes.
    """

    def __init__(self, name: str, template: tuple[int | None, ...]) -> None:
        self.name = name
        self._template = template
        self._count = template.count(None)
        # Nearly every kernel takes its pointers first; then a call only appends the scalars.
        pointers_first = None not in template[self._count :]
        self._tail: tuple[int, ...] | None = template[self._count :] if pointers_first else None  # type: ignore[assignment]

    @abstractmethod
    def __call__(self, device_index: int, *pointers: int) -> None:
        """Launch on torch's current stream of the device, asynchronously.

        Parameters
        ----------
        device_index : int
            The device of the memory that the pointers point to. The host toolchain ignores it.
        *pointers : int
            One address per pointer parameter, in the source's order; 0 where the kernel takes no memory.

        Raises
        ------
        KernelArgumentError
            The number of pointers is wrong, or one is not an int.
        LaunchError
            The driver refused the launch, or reports an earlier kernel's fault (``sticky``).
        """

    def _check_pointers(self, pointers: tuple[int, ...]) -> None:
        if len(pointers) != self._count:
            raise KernelArgumentError(
                kernel=self.name, argument="pointers", expected=f"{self._count} addresses", got=f"{len(pointers)}"
            )
        for position, pointer in enumerate(pointers):
            if type(pointer) is not int:
                raise KernelArgumentError(
                    kernel=self.name,
                    argument=f"pointer {position}",
                    expected="an address, as tensor.data_ptr() gives it",
                    got=f"{pointer!r} of type {type(pointer).__name__}",
                )

    def _arguments(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """All slots in the source's order."""
        if self._tail is not None:
            return pointers + self._tail
        waiting = iter(pointers)
        return tuple(next(waiting) if slot is None else slot for slot in self._template)
