"""The host toolchain's side of a kernel: the same checks and calls as on a GPU, run on the CPU and waited for."""

from __future__ import annotations

from collections.abc import Mapping

from samebits import host
from samebits.errors import CompileError, KernelArgumentError, LaunchError
from samebits.host.toolchain import FLAGS, MAX_SHARED_BYTES
from samebits.jit.kernel import BoundKernel, Dimensions, Kernel
from samebits.jit.signature import Parameter, kernel_names
from samebits.jit.source import Source, define_options

_LETTERS = {"pointer": "p", "bool": "b", "int": "i", "uint": "u", "float": "f", "tensor_map": "t"}


class HostToolchain:
    """The user's C++ compiler and the shim."""

    suffix = ".so"
    target = "cpu"

    def identity(self) -> str:
        """The compiler, its flags and the shim's text."""
        return "\n".join((host.find_compiler().identity, *FLAGS, host.shim_text()))

    def compile(self, source: Source, name: str, constants: Mapping[str, int | str]) -> bytes:
        """Compile all kernels of a source to one shared library; see :func:`samebits.host.build`."""
        texts = {source.path.name: source.text, **source.headers}
        defines = [option[2:] for option in define_options(constants)]
        return host.build(kernel_names(source.text), source.path.name, texts, defines)

    def load(self, name: str, content: bytes) -> host.Library:
        """Load a shared library."""
        return host.Library(name, content)

    def kernel(self, module: host.Library, name: str, parameters: tuple[Parameter, ...]) -> HostKernel:
        """One kernel of a loaded library."""
        return HostKernel(name, parameters, module)


class HostKernel(Kernel):
    """A kernel compiled for this machine's processor."""

    def __init__(self, name: str, parameters: tuple[Parameter, ...], library: host.Library) -> None:
        super().__init__(name, parameters)
        self.library = library
        read = tuple(_letter(parameter) for parameter in parameters)
        understood = library.parameters(name)
        if understood == ("absent",):
            raise CompileError(f"kernel {name} is left out of its source by the constants it was compiled with.")
        if read != understood:
            raise KernelArgumentError(
                f"kernel {name}: the source was read as parameters {read}, but the compiler understood {understood}. "
                "Write the parameter list in plain types."
            )

    def _bind(
        self, grid: Dimensions, block: Dimensions, shared_bytes: int, template: tuple[int | None, ...]
    ) -> HostBound:
        if shared_bytes > MAX_SHARED_BYTES:
            raise LaunchError(
                kernel=self.name,
                cause=f"{shared_bytes} bytes of shared memory; no GPU has more than {MAX_SHARED_BYTES}",
            )
        return HostBound(self, grid, block, shared_bytes, template)


def _letter(parameter: Parameter) -> str:
    return f"{_LETTERS[parameter.kind.rstrip('0123456789')]}{parameter.bytes}"


class HostBound(BoundKernel):
    """A host kernel that only lacks its pointers. A call returns when the kernel is done."""

    def __init__(
        self,
        kernel: HostKernel,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        template: tuple[int | None, ...],
    ) -> None:
        super().__init__(kernel.name, template)
        self._library = kernel.library
        self._grid = grid
        self._block = block
        self._shared_bytes = shared_bytes

    def __call__(self, device_index: int, *pointers: int) -> None:
        self._check_pointers(pointers)
        error = self._library.launch(self.name, self._grid, self._block, self._shared_bytes, self._arguments(pointers))
        if error:
            raise LaunchError(kernel=self.name, cause=error)
