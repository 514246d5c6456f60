"""State that sends a call to the reference: tracers, transforms, modes, autocast, gradients. State that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from gate_fakes import FakeKernel, chain, inputs, make_gate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from samebits import capture
from samebits.bits import compare
from samebits.gate import Gate, Site, State

Bench = tuple[Gate, FakeKernel, Site]

# torch scripts some of its own decompositions and warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def bench() -> Bench:
    """A site whose signature is verified, so that only state can send a call to the reference."""
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", dataclasses.replace(kernel.op(), reference=chain))
    with torch.no_grad():
        site(*inputs())
        site(*inputs())
        assert site.counters.fused == 1
    return gate, kernel, site


def expect_eager(bench: Bench, reason: str, call: Callable[[Site], object]) -> None:
    """``call`` must not run the kernel and must be counted under ``reason``, once."""
    _, kernel, site = bench
    before, launches = site.counters.eager, kernel.launches
    call(site)
    assert kernel.launches == launches
    assert site.counters.fused == 1
    assert site.counters.eager == before + 1
    assert site.counters.reasons[reason] == 1
    with torch.no_grad():  # And it was the state: without it the kernel answers again.
        site(*inputs())
    assert site.counters.fused == 2


# Tracing: the graph is the reference's.


class Graphs:
    """A torch.compile backend that keeps the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.code: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        self.code.append(module.print_readable(print_output=False))
        return module.forward


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_code(function: Callable[..., Tensor]) -> list[str]:
    """The graphs of ``function`` compiled for two shapes, without a graph break."""
    torch._dynamo.reset()
    graphs = Graphs()

    def call(x: Tensor, scale: Tensor) -> Tensor:
        return function(x, scale, 0.125) * 2

    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    for rows in (4, 5):
        x, scale, eps = inputs(rows)
        assert compare(compiled(x, scale), chain(x, scale, eps) * 2) is None
    return graphs.code


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("grad", [True, False])
def test_the_compiled_graph_is_the_references(bench: Bench, grad: bool) -> None:
    gate, kernel, site = bench
    cold = gate.site("cold", FakeKernel().op())
    cold_site = gate.site("t", dataclasses.replace(cold.op, reference=chain))
    with torch.set_grad_enabled(grad):
        plain = compiled_code(chain)
        assert compiled_code(site) == plain
        assert compiled_code(cold_site) == plain
        # A graph that is not the reference's would be noticed.
        assert compiled_code(lambda *args: chain(*args) + 0) != plain
    assert len(plain) >= 1
    assert kernel.launches == 2
    assert (site.counters.fused, site.counters.eager) == (1, 1)
    assert (cold_site.counters.fused, cold_site.counters.eager) == (0, 0)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_blocks_share_one_graph_as_they_do_without_sites() -> None:
    gate = make_gate()
    op = dataclasses.replace(FakeKernel().op(), reference=chain)

    class Block(nn.Module):
        def __init__(self, site: Callable[..., Tensor]) -> None:
            super().__init__()
            self.site = site

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.site(x, scale, 0.125)

    def graphs(sites: list[Callable[..., Tensor]]) -> int:
        torch._dynamo.reset()
        backend = Graphs()
        x, scale, _ = inputs()
        for site in sites:
            block = Block(site)
            block.compile(fullgraph=True, backend=backend)
            block(x, scale)
        return len(backend.code)

    assert graphs([gate.site(f"block.{n}", op) for n in range(3)]) == graphs([chain] * 3) == 1


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("strict", [True, False])
def test_the_exported_program_is_the_references(bench: Bench, strict: bool) -> None:
    _, kernel, site = bench

    class Model(nn.Module):
        def __init__(self, function: Callable[..., Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.function(x, scale, 0.125)

    x, scale, _ = inputs()
    ours = torch.export.export(Model(site), (x, scale), strict=strict)
    theirs = torch.export.export(Model(chain), (x, scale), strict=strict)
    assert ours.graph_module.code == theirs.graph_module.code
    assert kernel.launches == 2


def test_make_fx_and_functionalize(bench: Bench) -> None:
    _, kernel, site = bench
    x, scale, eps = inputs()
    for wrap in (lambda f: f, torch.func.functionalize):
        ours = make_fx(wrap(lambda x, s: site(x, s, eps)))(x, scale)
        theirs = make_fx(wrap(lambda x, s: chain(x, s, eps)))(x, scale)
        assert ours.code == theirs.code
    assert kernel.launches == 2


def test_jit_trace(bench: Bench) -> None:
    x, scale, eps = inputs()

    def trace(site: Site) -> None:
        with torch.no_grad():
            traced = torch.jit.trace(lambda x, s: site(x, s, eps), (x, scale), check_trace=False)
            other = torch.randn_like(x)
            assert compare(traced(other, scale), chain(other, scale, eps)) is None

    expect_eager(bench, "torch.jit is tracing", trace)


def test_fake_tensors(bench: Bench) -> None:
    x, scale, eps = inputs()
    with FakeTensorMode() as mode, torch.no_grad():
        fake, fake_scale = mode.from_tensor(x), mode.from_tensor(scale)

    def inside(site: Site) -> None:
        with mode, torch.no_grad():
            assert type(site(fake, fake_scale, eps)) is type(fake)

    expect_eager(bench, "a torch dispatch mode is active", inside)

    def outside(site: Site) -> None:
        with torch.no_grad():
            site(fake, fake_scale, eps)

    kernel, site = bench[1:]
    outside(site)
    assert kernel.verified_launches == 2
    reason = "argument 0 is a tensor subclass (torch._subclasses.fake_tensor.FakeTensor)"
    assert site.counters.reasons[reason] == 1


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.vmap(f)(x),
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_functorch(bench: Bench, transform: Callable[..., object]) -> None:
    x, scale, eps = inputs()
    expect_eager(bench, "a functorch transform is active", lambda site: transform(lambda row: site(row, scale, eps), x))


def test_wrapped_tensors_outside_their_transform(bench: Bench) -> None:
    _, kernel, site = bench
    x, scale, eps = inputs()
    functional = torch._to_functional_tensor(x)
    assert type(functional) is Tensor
    with torch.no_grad():
        site(functional, torch._to_functional_tensor(scale), eps)
    assert kernel.launches == 2
    assert site.counters.reasons["an argument has no plain memory"] == 1


def test_forward_mode_differentiation(bench: Bench) -> None:
    x, scale, eps = inputs()

    def dual(site: Site) -> None:
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            made = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(site(made, scale, eps)).tangent
            assert compare(tangent, (1 + scale).expand(x.shape).contiguous()) is None

    expect_eager(bench, "forward-mode differentiation is active", dual)


class Listening(TorchDispatchMode):
    """A dispatch mode such as a profiler or a FLOP counter is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    """A function mode of somebody else."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_see_eager(bench: Bench) -> None:
    def listen(site: Site) -> None:
        with torch.no_grad(), Listening() as mode:
            site(*args)
        assert mode.calls == 3

    args = inputs()
    expect_eager(bench, "a torch dispatch mode is active", listen)


def test_function_modes_see_eager(bench: Bench) -> None:
    def watch(site: Site) -> None:
        with torch.no_grad(), Watching():
            site(*args)

    args = inputs()
    expect_eager(bench, "a torch function mode is active", watch)


def test_a_default_device_is_no_obstacle(bench: Bench) -> None:
    _, _, site = bench
    args = inputs()
    with torch.no_grad(), torch.device("cpu"):
        assert capture.interception() is None
        site(*args)
    assert site.counters.fused == 2


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_eager(bench: Bench, dtype: torch.dtype) -> None:
    args = inputs()

    def cast(site: Site) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            site(*args)

    expect_eager(bench, "autocast is on for cpu", cast)


def test_autocast_of_another_device_or_switched_off_is_no_obstacle(bench: Bench) -> None:
    _, _, site = bench
    args = inputs()
    with torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        try:
            site(*args)
        finally:
            torch.set_autocast_enabled("cuda", False)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            site(*args)
    assert site.counters.fused == 3


# Gradients.


def test_inputs_and_weights_that_require_grad(bench: Bench) -> None:
    x, scale, eps = inputs()
    weight = nn.Parameter(scale)

    def train(site: Site) -> None:
        result = site(x, weight, eps)
        result.sum().backward()
        assert weight.grad is not None

    expect_eager(bench, "an argument requires grad", train)


def test_grad_mode_without_an_argument_that_requires_grad(bench: Bench) -> None:
    _, _, site = bench
    args = inputs()
    assert torch.is_grad_enabled()
    site(*args)
    assert site.counters.fused == 2


def test_parameters_without_grad_mode(bench: Bench) -> None:
    gate, _, site = bench
    x, scale, eps = inputs()
    with torch.no_grad():
        site(x, nn.Parameter(scale), eps)
    with torch.inference_mode():
        result = site(x, nn.Parameter(scale), eps)
        assert result.is_inference()
        site(x.clone(), scale.clone(), eps)
    assert (site.counters.fused, len(gate.verdicts())) == (4, 1)


def test_verified_in_inference_mode_and_called_outside() -> None:
    gate, kernel = make_gate(), FakeKernel()
    site = gate.site("s", kernel.op())
    with torch.inference_mode():
        assert compare(site(*inputs()), chain(*inputs())) is None
    with torch.no_grad():
        result = site(*inputs())
    assert not result.is_inference()
    assert [verdict.state for verdict in gate.verdicts()] == [State.VERIFIED]
    assert site.counters.fused == 1


def test_the_deterministic_flag_is_part_of_the_signature(bench: Bench) -> None:
    gate, _, site = bench
    args = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            site(*args)
            assert len(gate.verdicts()) == 2
            site(*args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert site.counters.fused == 2
