"""Signatures and the protection of inputs: keys, texts, rebuilt arguments, copies that keep what matters, poison."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.bits import compare, integer_view
from samebits.signature import Signature, TensorSpec, parameter_names, signature_key, why_no_key
from samebits.verify import poison, protect

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def views() -> dict[str, Tensor]:
    """Tensors with every kind of strides that a chain may meet."""
    base = torch.arange(4 * 6 * 10, dtype=torch.float32).reshape(4, 6, 10)
    return {
        "contiguous": base,
        "slice": base[1:3, ::2, 3:7],
        "transposed": base.transpose(0, 2),
        "chunk": base.view(4, 60).chunk(6, dim=1)[2],
        "expanded": base[:, :1].expand(4, 6, 10),
        "scalar": base[1, 2, 3],
        "sliding windows": base.flatten().as_strided((20, 8), (4, 1)),
        "one byte on": torch.arange(9, dtype=torch.uint8)[1:],
        "one element on": torch.arange(9, dtype=torch.float16)[1:].view(2, 4),
        "parameter": torch.nn.Parameter(base),
    }


VIEWS = list(views())


@pytest.mark.parametrize("name", VIEWS)
def test_protected_copies_keep_values_strides_overlap_and_alignment(name: str) -> None:
    tensor = views()[name]
    with torch.no_grad():
        copy = protect(tensor)
    assert compare(copy.view, tensor) is None
    assert copy.view.data_ptr() % 16 == tensor.data_ptr() % 16
    assert copy.view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    if name in ("expanded", "sliding windows"):
        first, last = (0, 0, 0), (0, 5, 0)
        if name == "sliding windows":
            first, last = (0, 4), (1, 0)
        copy.view[first] = 99.0
        assert copy.view[last] == 99.0


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_between_the_elements_is_found(name: str) -> None:
    tensor = views()[name]
    with torch.no_grad():
        copy = protect(tensor)
        assert compare(copy.flat, copy.original) is None
        for place in (0, copy.flat.numel() - 1, copy.flat.numel() // 2):
            kept = copy.flat[place].clone()
            copy.flat[place] = kept + 1
            assert compare(copy.flat, copy.original) is not None
            copy.flat[place] = kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_no_value_that_arithmetic_gives(dtype: torch.dtype) -> None:
    output = poison(torch.zeros(5, dtype=dtype))
    patterns = set(integer_view(output).flatten().tolist())
    assert len(patterns) == 1
    assert patterns != {0}
    if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert output.isnan().all()
        # Arithmetic on it gives another pattern: the quiet bit is not set in it.
        quiet = {torch.float16: 0x200, torch.bfloat16: 0x40, torch.float32: 1 << 22, torch.float64: 1 << 51}[dtype]
        (pattern,) = patterns
        assert pattern & quiet == 0
        wide = output.double() if dtype is not torch.float64 else output
        assert compare((wide + 0).to(dtype), output) is not None


def test_spans() -> None:
    assert TensorSpec.of(torch.zeros(3, 4)).span == 12
    assert TensorSpec.of(torch.zeros(3, 4)[:, ::2]).span == 11
    assert TensorSpec.of(torch.zeros(1).expand(7)).span == 1
    assert TensorSpec.of(torch.tensor(1.0)).span == 1
    big = TensorSpec(torch.bfloat16, (2, 8), (2**31 + 256, 1), torch.device("cpu"), 0)
    assert big.span == 2**31 + 256 + 8


def test_the_text_of_a_signature() -> None:
    base = torch.zeros(2, 12, dtype=torch.bfloat16)
    args = (torch.zeros(1, 3, 4), base[:, 4:8], None, 1e-6, "diffusers", True)
    text = str(Signature.of(("x", "scale", "index", "eps"), args))
    assert text == (
        "x: float32[1, 3, 4] cpu, scale: bfloat16[2, 4] strides [12, 1] +8 bytes cpu, index=None, eps=1e-06, "
        "argument 4='diffusers', argument 5=True"
    )


def test_names_come_from_the_reference() -> None:
    def reference(x: Tensor, scale: Tensor, eps: float = 1e-6, *, keyword: int = 0) -> Tensor:
        local = x
        return local

    assert parameter_names(reference) == ("x", "scale", "eps")
    assert parameter_names(torch.add) == ()


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "parameter"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rebuilt_arguments_have_the_same_key(name: str, dtype: torch.dtype) -> None:
    like = views()[name]
    spec = TensorSpec(dtype, tuple(like.shape), like.stride(), like.device, 8)
    signature = Signature(("x", "eps"), (spec, 0.5))
    one, two, other = signature.rebuild(1), signature.rebuild(1), signature.rebuild(2)
    assert signature_key(one) == signature_key(two) == signature_key(other)
    assert Signature.of(("x", "eps"), one) == signature
    assert compare(one[0], two[0]) is None
    if one[0].numel() > 50:
        assert compare(one[0], other[0]) is not None


def test_what_is_unfit() -> None:
    def unfit(*args: Any) -> str | None:
        return Signature.of((), args).unfit

    x = torch.zeros(3)
    assert unfit(x, 1.0) is None
    assert unfit(1.0) == "no argument is a tensor"
    assert unfit(x, x.to("meta")) == "the arguments are on different devices (cpu, meta)"
    assert unfit(x.to("meta")) == "no kernel is written for meta devices"
    odd = TensorSpec(torch.float32, (3,), (1,), torch.device("cpu"), 3)
    assert Signature(("x",), (odd,)).unfit == "the address of x is no multiple of its element size"
    with pytest.raises(ValueError, match="expected an address that is a multiple of the element size, got 3 bytes"):
        odd.flat()


def test_keys_tell_apart_what_is_equal_to_a_dictionary() -> None:
    x = torch.zeros(3)
    scalars = [1, 1.0, True, 0, 0.0, -0.0, False, None, "1", math.nan, math.inf, -math.inf]
    keys = [signature_key((x, scalar)) for scalar in scalars]
    assert None not in keys
    assert len(set(keys)) == len(scalars)
    assert signature_key((x, float("nan"))) == signature_key((x, float("nan")))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_gets_no_key_and_why() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    reasons = {
        "a tensor with a lazy negation or conjugation": [z.conj(), z.conj().imag],
        "a tensor of layout torch.sparse_coo": [torch.eye(3).to_sparse()],
        "a nested tensor": [torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])],
        "a tensor on the meta device": [torch.empty(3, device="meta")],
        "an empty tensor": [torch.empty(0, 3)],
        "a builtins.list, neither a tensor nor a scalar": [[1, 2]],
        "a torch.Size, neither a tensor nor a scalar": [torch.Size([3])],
    }
    for reason, spoiled in reasons.items():
        for arg in spoiled:
            assert signature_key((torch.zeros(1), arg)) is None
            assert why_no_key((torch.zeros(1), arg)) == f"argument 1 is {reason}"
    assert signature_key((z, z.conj().resolve_conj())) is not None
    assert why_no_key((torch._to_functional_tensor(torch.zeros(3)),)) == "an argument has no plain memory"


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    offset=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
)
def test_any_strided_view_is_protected(
    shape: list[int], order: Any, step: int, offset: int, dtype: torch.dtype
) -> None:
    strides = [0] * len(shape)
    stride = step
    dims = list(range(len(shape)))
    order.shuffle(dims)
    for dim in dims:
        strides[dim] = 0 if order.random() < 0.2 else stride
        stride *= shape[dim]
    base = torch.arange(4**4 * 3 + 6).to(dtype)
    tensor = base.as_strided(shape, strides, offset)
    copy = protect(tensor)
    assert compare(copy.view, tensor) is None
    assert signature_key((copy.view,)) == signature_key((tensor,))
