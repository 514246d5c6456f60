"""The proof of a picture finds one ulp in one step, calls an unsteady eager void, and is quiet about equal runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from samebits import tiny
from samebits.proof.pictures import Picture, first_difference, paint, prove, sha256

ASKED = {"prompt": "a red fox", "width": 64, "height": 64, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def pipeline() -> DiffusionPipeline:
    built = tiny.build("tiny-z-image", torch.bfloat16)
    built.set_progress_bar_config(disable=True)
    return built


@pytest.fixture(scope="module")
def eager(pipeline: DiffusionPipeline) -> Picture:
    return paint(pipeline, ASKED, 7)


def one_ulp_at(step: int) -> Callable[..., Any]:
    """A hook for a denoiser that moves one element of its output by one ulp in that call, counted from 1."""
    calls = 0

    def hook(module: torch.nn.Module, args: Any, outputs: tuple[list[torch.Tensor]]) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            outputs[0][0].view(torch.int16).view(-1)[5] += 1

    return hook


def test_a_run_keeps_every_latent_and_its_hash(eager: Picture) -> None:
    assert len(eager.latents) == len(eager.latents_sha256) == 3
    assert len(set(eager.latents_sha256)) == 3
    assert eager.latents[0].shape == (1, 16, 8, 8)
    for latents, digest in zip(eager.latents, eager.latents_sha256, strict=True):
        assert hashlib.sha256(latents.numpy().tobytes()).hexdigest() == digest
    pixels = np.asarray(eager.image)
    assert pixels.shape == (64, 64, 3)
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == eager.image_sha256
    assert eager.seconds > 0


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_same_run_gives_the_same_bits(name: str) -> None:
    pipe = tiny.build(name, torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    runs = [paint(pipe, ASKED, 7) for _ in range(3)]
    proof = prove(*runs)
    assert (proof.equal, proof.void, proof.steps, proof.first_difference) == (True, False, 3, None)
    assert "each of 3 steps" in str(proof)
    other = prove(runs[0], runs[1], paint(pipe, ASKED, 8))
    assert not other.equal
    assert other.first_difference is not None
    assert other.first_difference.step == 1


@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_ulp_in_one_step_is_found_in_that_step(pipeline: DiffusionPipeline, eager: Picture, step: int) -> None:
    hook = pipeline.transformer.register_forward_hook(one_ulp_at(step))
    try:
        changed = paint(pipeline, ASKED, 7)
    finally:
        hook.remove()
    proof = prove(eager, paint(pipeline, ASKED, 7), changed)
    assert (proof.equal, proof.void) == (False, False)
    first = proof.first_difference
    assert first is not None
    assert (first.where, first.step) == ("latents", step)
    assert first.expected == eager.latents_sha256[step - 1]
    assert first.actual == changed.latents_sha256[step - 1]
    assert "1 of 1024 elements differ" in first.detail
    assert f"after step {step}" in str(proof)
    assert json.loads(json.dumps(proof.to_json()))["first_difference"]["step"] == step


def test_an_eager_that_differs_from_itself_makes_it_void(pipeline: DiffusionPipeline, eager: Picture) -> None:
    hook = pipeline.transformer.register_forward_hook(one_ulp_at(2))
    try:
        unsteady = paint(pipeline, ASKED, 7)
    finally:
        hook.remove()
    # Void also where the fused run happens to agree with one of the two.
    proof = prove(eager, unsteady, eager)
    assert (proof.equal, proof.void) == (False, True)
    assert proof.first_difference is not None
    assert proof.first_difference.step == 2
    assert str(proof).startswith("Void: eager does not repeat itself")


def test_a_picture_that_alone_differs_is_found(eager: Picture) -> None:
    pixels = np.asarray(eager.image).copy()
    pixels[3, 4, 1] ^= 1
    image = eager.image.copy()
    image.putpixel((4, 3), tuple(int(value) for value in pixels[3, 4]))
    changed = replace(eager, image=image, image_sha256=hashlib.sha256(image.tobytes()).hexdigest())
    first = first_difference(changed, eager)
    assert first is not None
    assert (first.where, first.step) == ("image", None)
    assert "1 of 12288 elements differ, first at [3, 4, 1]" in first.detail
    assert "the final picture" in str(first)
    assert first_difference(eager, eager) is None


def test_another_number_of_steps_or_another_dtype_is_a_difference(eager: Picture) -> None:
    shorter = replace(eager, latents=eager.latents[:2], latents_sha256=eager.latents_sha256[:2])
    first = first_difference(shorter, eager)
    assert first is not None
    assert (first.where, first.step) == ("steps", 3)
    assert str(first) == "2 denoising steps instead of 3"
    halves = tuple(latents.view(torch.int32) for latents in eager.latents)
    assert [sha256(latents) for latents in halves] == list(eager.latents_sha256)
    first = first_difference(replace(eager, latents=halves), eager)
    assert first is not None
    assert "dtype" in first.detail


def test_a_hash_is_of_the_elements_in_order_whatever_the_strides() -> None:
    plain = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert sha256(plain) == sha256(plain.t().contiguous().t())
    assert sha256(plain) != sha256(plain.t())
    assert sha256(torch.tensor(0.0)) != sha256(torch.tensor(-0.0))
    assert sha256(torch.tensor([float("nan")])) == sha256(torch.tensor([float("nan")]))
