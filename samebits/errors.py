"""One exception per mistake that a caller can act on. A leaf: it imports nothing of samebits and no torch.

Every message is built from its class's ``template``, so the same mistake always reads the same: what was
expected, what came, what to do. The parts stay readable as attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SamebitsError(Exception):
    """The base of every error that samebits raises on purpose.

    Parameters
    ----------
    message : str, optional
        A ready sentence. Classes with a ``template`` build theirs from ``fields`` instead.
    **fields
        The parts of the sentence. Each is kept as an attribute of the error.
    """

    template: ClassVar[str] = "{message}"
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later without anybody having changed anything in the program."""

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        self.__dict__.update(fields)
        super().__init__(self.template.format(**fields) if message is None else message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their positional arguments alone, which would drop the fields on the way
        # back from a worker process.
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(cls: type[SamebitsError], message: str, fields: dict[str, Any]) -> SamebitsError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


class SettingsError(SamebitsError, ValueError):
    """A ``SAMEBITS_*`` environment variable holds a value that means nothing."""

    template = "{variable}={value!r} is not understood: expected {expected}. Correct the variable or unset it."

    def __init__(self, message: str | None = None, *, variable: str = "", value: str = "", expected: str = "") -> None:
        super().__init__(message, variable=variable, value=value, expected=expected)


class DeferredBiasError(SamebitsError, TypeError):
    """A linear's output that still lacks its bias was used as a tensor, consumed twice, or dropped."""

    template = (
        "a deferred bias: {problem}. Expected: exactly one kernel that takes it in, or one call of its add(). "
        "This is a fault of the code around the linear, never of its input."
    )

    def __init__(self, message: str | None = None, *, problem: str = "") -> None:
        super().__init__(message, problem=problem)


class LoraFusingError(SamebitsError, TypeError):
    """LoRA weights were to be added to quantised weights."""

    template = (
        "fuse_lora would add a LoRA to the bytes of {count} quantised linears (the first is {first}), where there is "
        "nothing to add to. Use the LoRA unfused, which works, or take it off with unload_lora(); to fuse it, load the "
        "model's unquantised (bf16) weights."
    )

    def __init__(self, message: str | None = None, *, count: int = 0, first: str = "") -> None:
        super().__init__(message, count=count, first=first)


class KernelArgumentError(SamebitsError, TypeError):
    """A value handed to a kernel does not fit the C type its source declares."""

    template = "kernel {kernel}: argument {argument!r} must be {expected}, got {got}."

    def __init__(
        self, message: str | None = None, *, kernel: str = "", argument: str = "", expected: str = "", got: str = ""
    ) -> None:
        super().__init__(message, kernel=kernel, argument=argument, expected=expected, got=got)


class CompileError(SamebitsError):
    """A kernel's source could not be compiled, or the result could not be loaded."""

    template = "kernel {kernel} does not compile for {target}. The compiler said:\n{log}"

    def __init__(self, message: str | None = None, *, kernel: str = "", target: str = "", log: str = "") -> None:
        super().__init__(message, kernel=kernel, target=target, log=log)


class CompileInCaptureError(SamebitsError):
    """A kernel that is not loaded yet was asked for while a CUDA graph is being captured.

    Loading a module synchronises and would break the capture; the same call works once no capture is open.
    """

    template = (
        "kernel {kernel} is not loaded for {target} and cannot be while a CUDA graph is being captured. "
        "Run the same shapes once before the capture."
    )
    retryable = True

    def __init__(self, message: str | None = None, *, kernel: str = "", target: str = "") -> None:
        super().__init__(message, kernel=kernel, target=target)


class LaunchError(SamebitsError):
    """The driver refused to launch a kernel.

    ``sticky`` is true for an error that leaves the CUDA context unusable: every later CUDA call of the
    process fails too, so nothing may be retried and eager cannot help either.
    """

    template = "kernel {kernel} could not be launched: {cause}."

    def __init__(self, message: str | None = None, *, kernel: str = "", cause: str = "", sticky: bool = False) -> None:
        super().__init__(message, kernel=kernel, cause=cause, sticky=sticky)
        self.sticky = sticky


class CudaContextError(SamebitsError):
    """The CUDA context of this process is lost. samebits stopped; so will everything else that uses CUDA."""

    template = (
        "the CUDA context of this process is lost: {cause}. It was noticed at site {site!r} (op {op}). samebits has "
        "stopped and retries nothing, because no CUDA call of this process can succeed any more, eager's included. "
        "Restart the process; with CUDA_LAUNCH_BLOCKING=1 the error appears at the launch that causes it."
    )

    def __init__(self, message: str | None = None, *, cause: str = "", site: str = "", op: str = "") -> None:
        super().__init__(message, cause=cause, site=site, op=op)


class ContractViolation(SamebitsError):
    """Strict mode only: a kernel broke its contract, so its signature was refused."""

    template = (
        "op {op} at site {site!r} is refused for {signature}: {cause}. "
        "Without strict=True eager's result goes on and the refusal is counted in the report."
    )

    def __init__(
        self, message: str | None = None, *, op: str = "", site: str = "", signature: str = "", cause: str = ""
    ) -> None:
        super().__init__(message, op=op, site=site, signature=signature, cause=cause)


class KernelFailed(SamebitsError):
    """Strict mode only: a kernel could not be built or launched for a signature that its op takes."""

    template = (
        "op {op} at site {site!r} failed for {signature}: {cause}. "
        "Without strict=True eager's result goes on and the failure is counted in the report."
    )

    def __init__(
        self, message: str | None = None, *, op: str = "", site: str = "", signature: str = "", cause: str = ""
    ) -> None:
        super().__init__(message, op=op, site=site, signature=signature, cause=cause)


class EvidenceError(SamebitsError, ValueError):
    """An evidence file, or a row about to be written into one, is not what its kind must be."""

    template = "evidence {kind}, {where}: {problem}. Files under evidence/ are written by scripts/gpu, never by hand."

    def __init__(self, message: str | None = None, *, kind: str = "", where: str = "", problem: str = "") -> None:
        super().__init__(message, kind=kind, where=where, problem=problem)


class UnsupportedModelError(SamebitsError, ValueError):
    """There is no denoiser of a known family in what was given to ``apply``."""

    template = (
        "there is nothing in what was given, of the type {got}, that samebits can stand for: expected a diffusers "
        "pipeline whose denoiser is one of {families}, or such a denoiser itself."
    )

    def __init__(self, message: str | None = None, *, got: str = "", families: str = "") -> None:
        super().__init__(message, got=got, families=families)


class AlreadyAppliedError(SamebitsError, RuntimeError):
    """A part of a model is applied already, and not in the way that was asked for now."""

    template = (
        "a part of this is applied already ({options}), with other options, another gate or other models. "
        "Call remove() on the handle of that apply first."
    )

    def __init__(self, message: str | None = None, *, options: str = "") -> None:
        super().__init__(message, options=options)


class CheckpointError(SamebitsError, ValueError):
    """A model folder on disk is broken: a file is missing, cut off, or says what cannot be."""

    template = "{path}: {problem}"

    def __init__(self, message: str | None = None, *, path: str = "", problem: str = "") -> None:
        super().__init__(message, path=path, problem=problem)


class ModelError(SamebitsError, ValueError):
    """A name that stands for no model, or for one that samebits cannot paint with."""

    template = "{model}: {problem}"

    def __init__(self, message: str | None = None, *, model: str = "", problem: str = "") -> None:
        super().__init__(message, model=model, problem=problem)


class DeviceError(SamebitsError, ValueError):
    """A device that does not exist here, or cannot do what was asked of it."""

    template = "device {device}: {problem}"

    def __init__(self, message: str | None = None, *, device: str = "", problem: str = "") -> None:
        super().__init__(message, device=device, problem=problem)


class SizeError(SamebitsError, ValueError):
    """A picture size that the model cannot paint."""

    template = "size {width}x{height}: {problem}"

    def __init__(self, message: str | None = None, *, width: int = 0, height: int = 0, problem: str = "") -> None:
        super().__init__(message, width=width, height=height, problem=problem)


class CertificateError(SamebitsError, ValueError):
    """The folder of certificates is not one that samebits would use, or a file in it cannot be touched."""

    template = "the certificates in {path} cannot be used: {problem}"

    def __init__(self, message: str | None = None, *, path: str = "", problem: str = "") -> None:
        super().__init__(message, path=path, problem=problem)
