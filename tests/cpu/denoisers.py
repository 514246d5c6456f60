"""Small random denoisers of the real diffusers classes, and gates whose kernels can be told how to behave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel, ZImageTransformer2DModel

from samebits.bits import compare
from samebits.gate import Gate
from samebits.ops import Op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _filled(model: Any, seed: int, dtype: torch.dtype) -> Any:
    """Give every parameter random values: fresh models have zeros and ones that hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
    # Not model.to(dtype): diffusers warns that some classes keep modules in float32, these have none.
    return torch.nn.Module.to(model, dtype).eval().requires_grad_(False)


def qwen(dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any) -> Any:
    """A Qwen-Image denoiser of two blocks, width 64."""
    settings = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 48,
        "axes_dims_rope": (8, 12, 12),
    }
    return _filled(QwenImageTransformer2DModel(**(settings | config)), seed, dtype)


def qwen_inputs(
    dtype: torch.dtype = torch.float32, *, batch: int = 2, mask: bool = True, edit: bool = False, seed: int = 1
) -> dict[str, Any]:
    """Arguments of a forward: 16 picture tokens (and 4 of a picture to edit), 5 text tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 20 if edit else 16
    shapes = [(1, 4, 4), (1, 2, 2)] if edit else [(1, 4, 4)]
    inputs = {
        "hidden_states": torch.randn(batch, tokens, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 5, 48, generator=generator).to(dtype),
        "timestep": torch.linspace(0.3, 0.9, batch),
        "img_shapes": [shapes] * batch,
        "return_dict": False,
    }
    if mask:
        inputs["encoder_hidden_states_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]] * batch)[:batch]
    return inputs


def z_image(dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any) -> Any:
    """A Z-Image denoiser of two layers and one of each refiner, width 64, with the SigLIP parts of Omni."""
    settings = {
        "in_channels": 4,
        "dim": 64,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 48,
        "siglip_feat_dim": 40,
        "axes_dims": [8, 12, 12],
        "axes_lens": [256, 64, 64],
    }
    return _filled(ZImageTransformer2DModel(**(settings | config)), seed, dtype)


def z_image_inputs(dtype: torch.dtype = torch.float32, *, omni: bool = False, seed: int = 1) -> dict[str, Any]:
    """Arguments of a forward of two samples of unlike size, so that padding and masks occur."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    inputs: dict[str, Any] = {"t": torch.tensor([0.3, 0.6]).to(dtype), "return_dict": False}
    if not omni:
        return inputs | {"x": [randn(4, 1, 8, 8), randn(4, 1, 8, 16)], "cap_feats": [randn(7, 48), randn(40, 48)]}
    return inputs | {
        "x": [[randn(4, 1, 8, 8), randn(4, 1, 8, 8)], [randn(4, 1, 8, 16)]],
        "cap_feats": [[randn(7, 48), randn(9, 48)], [randn(20, 48)]],
        "siglip_feats": [[randn(4, 4, 40), None], [None]],
        "image_noise_mask": [[0, 1], [1]],
    }


def run(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """One forward without gradients, as a tuple of tensors."""
    with torch.no_grad():
        return flat(model(**inputs))


def flat(output: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a forward's result."""
    (first, *_) = output
    return tuple(first) if isinstance(first, list) else (first,)


def same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have the same dtype, shape, strides and bits."""
    return len(actual) == len(expected) and all(compare(a, e) is None for a, e in zip(actual, expected, strict=True))


def check_same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Fail unless the tensors are equal to the last bit, and unless one ulp somewhere would have been noticed."""
    differences = [str(compare(a, e)) for a, e in zip(actual, expected, strict=True) if compare(a, e) is not None]
    assert not differences, "\n".join(differences)
    assert all(tensor.isfinite().all() for tensor in expected)
    moved = [tensor.clone() for tensor in expected]
    one_ulp_up(moved[-1])
    assert not same_bits(actual, moved)


def one_ulp_up(tensor: torch.Tensor, index: int = -1) -> None:
    """Move one element of a contiguous tensor away from zero by one unit in the last place."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(-1).view(integers)[index] += 1


Kernel = Callable[..., Any]
NOT_HERE = "the op takes no call of this test"
PRODUCTS = ("linear_gelu_tanh", "linear_swiglu")


class KernelGate(Gate):
    """A real gate, on any device, whose kernels are Python: each computes its op's reference.

    Attributes
    ----------
    lacks : collection of str
        Ops that say of every call that they do not take it.
    spoil : callable or None
        ``spoil(op_name, outputs)`` may write to the outputs of a kernel once its signature is verified.
    """

    def __init__(self, lacks: Collection[str] = (), **options: Any) -> None:
        super().__init__(unavailable=lambda device, host: None, **options)
        self.lacks = lacks
        self.spoil: Callable[[str, Sequence[torch.Tensor]], None] | None = None
        self.ops: dict[str, Op] = {}

    def site(self, name: str, op: Op, **options: Any) -> Any:
        """A site of the op with a Python kernel in place of the real one."""
        if op.name not in self.ops:
            self.ops[op.name] = dataclasses.replace(
                op,
                prepare=lambda *args: self._kernel(op),
                unsupported=lambda *args: NOT_HERE if op.name in self.lacks else None,
            )
        return super().site(name, self.ops[op.name], **options)

    def _kernel(self, op: Op) -> Kernel:
        def launch(*args: Any, out: tuple[torch.Tensor, ...] | None = None) -> Any:
            result = op.reference(*args)
            values = result if isinstance(result, tuple) else (result,)
            filled = tuple(torch.empty_like(value) for value in values) if out is None else out
            for target, value in zip(filled, values, strict=True):
                target.copy_(value)
            if self.spoil is not None and out is None:  # a comparison hands in the memory to fill
                self.spoil(op.name, filled)
            return filled if isinstance(result, tuple) else filled[0]

        return launch


def fused_calls(handle: Any) -> int:
    """How many calls kernels answered."""
    return sum(row.fused for row in handle.report().rows)


def eager_calls(handle: Any) -> int:
    """How many calls eager answered."""
    return sum(row.eager for row in handle.report().rows)
