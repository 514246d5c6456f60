"""A lost CUDA context: the gate stops, says so, and retries nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gate_fakes import FakeKernel, chain, inputs, make_gate, only
from torch import Tensor

from samebits.bits import compare
from samebits.errors import CudaContextError, KernelArgumentError, LaunchError
from samebits.gate import State
from samebits.ops._op import Args
from samebits.verify import is_out_of_memory, is_retryable, is_sticky


class CodedError(torch.AcceleratorError):
    """An error of torch's with a code, as the CUDA runtime raises it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.error_code = code


STICKY = [
    LaunchError(kernel="k", cause="CUDA_ERROR_ILLEGAL_ADDRESS", sticky=True),
    CodedError("CUDA error: an illegal memory access was encountered", 700),
    CodedError("CUDA error: unspecified launch failure", 719),
    RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA error: misaligned address"),
]
NOT_STICKY = [
    LaunchError(kernel="k", cause="too many resources requested for launch"),
    CodedError("CUDA error: too many resources requested for launch", 701),
    CodedError("CUDA error: out of memory", 2),
    CodedError("CUDA error: operation not permitted when stream is capturing", 900),
    RuntimeError("shape '[3]' is invalid for input of size 4"),
    ValueError("an illegal memory access, in words only"),
    KernelArgumentError(kernel="k", argument="rows", expected="an int32", got="2**40"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_sticky_errors_are_known(error: Exception) -> None:
    assert is_sticky(error)
    assert not is_retryable(error)


@pytest.mark.parametrize("error", NOT_STICKY, ids=str)
def test_other_errors_are_not_sticky(error: Exception) -> None:
    assert not is_sticky(error)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(CodedError("CUDA error: out of memory", 2))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(LaunchError(kernel="k", cause="out of resource: shared memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("error", STICKY, ids=str)
def test_the_gate_stops_and_says_so(error: Exception, verified: bool, caplog: pytest.LogCaptureFixture) -> None:
    gate, kernel, other_kernel = make_gate(), FakeKernel(), FakeKernel()
    site, other = gate.site("block.7", kernel.op()), gate.site("other", other_kernel.op())
    args = inputs()
    other(*args)
    if verified:
        site(*args)
        site(*args)

    def dies(args: Args, outputs: tuple[Tensor, ...]) -> None:
        raise error

    kernel.fill = dies
    launches = kernel.launches
    with pytest.raises(CudaContextError, match=r"the CUDA context of this process is lost.*site 'block.7'") as caught:
        site(*args)
    assert caught.value.__cause__ is error
    assert any("the CUDA context of this process is lost" in record.getMessage() for record in caplog.records)
    # Nothing is launched or compared any more, at any site; eager runs and may say what it likes.
    other_launches = other_kernel.launches
    for _ in range(3):
        assert compare(site(*args), chain(*args)) is None
        assert compare(other(*args), chain(*args)) is None
    assert (kernel.launches, other_kernel.launches) == (launches + 1, other_launches)
    assert gate.stopped == str(caught.value)
    assert site.counters.reasons[gate.stopped] == 3
    with pytest.raises(CudaContextError):
        gate.enable()


def test_a_shared_memory_error_fails_one_signature_only() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    kernel.prepare_error = LaunchError(kernel="k", cause="out of resource: shared memory, required 300000")
    site(*inputs())
    kernel.prepare_error = None
    for _ in range(2):
        site(*inputs())
        site(*inputs(rows=2))
    assert [verdict.state for verdict in gate.verdicts()] == [State.FAILED, State.VERIFIED]
    assert (kernel.prepared, site.counters.fused, gate.stopped) == (1, 1, None)


def test_a_sticky_error_of_the_reference_is_the_callers_own() -> None:
    gate, kernel = make_gate(), FakeKernel()

    def dies(*args: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kernel.reference = dies
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        gate.site("s", kernel.op())(*inputs())
    assert type(caught.value) is RuntimeError
    assert only(gate).state is State.UNKNOWN
