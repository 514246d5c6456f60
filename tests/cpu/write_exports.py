"""Writes ModelOpt exports of the embedded models with the real ``nvidia-modelopt``: a program of its own.

usage: write_exports.py FOLDER

In a process of its own because ModelOpt, once imported, changes classes of diffusers, transformers and torch. A model
is calibrated on one small picture. Folders: ``MODEL/FP8`` and ``MODEL/NVFP4`` are whole pipelines,
``MODEL/FP8_PER_CHANNEL_PER_TOKEN`` and ``MODEL/MIXED`` a transformer alone.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from samebits import tiny

# What other packages say about each other's versions is not ours to mend.
warnings.simplefilter("ignore")
import modelopt.torch.quantization as mtq  # noqa: E402
from modelopt.torch.export import export_hf_checkpoint  # noqa: E402

CALLS: dict[str, dict[str, Any]] = {
    "tiny-qwen-image": {"true_cfg_scale": 1.0},
    "tiny-z-image": {"guidance_scale": 0.0},
}


def recipes() -> dict[str, tuple[Any, bool]]:
    """Name to ModelOpt's recipe, and whether the whole pipeline is exported."""
    mixed = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    four = [entry for entry in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if entry.get("cfg")]
    for entry in four:
        name = entry["quantizer_name"].removeprefix("*")
        for feed_forward in ("*img_mlp*", "*feed_forward*"):
            mixed["quant_cfg"].append({**entry, "quantizer_name": f"{feed_forward}{name}"})
    return {
        "FP8": (mtq.FP8_DEFAULT_CFG, True),
        "NVFP4": (mtq.NVFP4_DEFAULT_CFG, True),
        "FP8_PER_CHANNEL_PER_TOKEN": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, False),
        "MIXED": (mixed, False),
    }


def write(folder: Path, name: str, recipe: Any, whole: bool) -> None:
    pipeline = tiny.build(name, torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)

    def calibrate(_: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        arguments = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent", **CALLS[name]}
        pipeline("a fox", generator=generator, **arguments)

    pipeline.transformer = mtq.quantize(pipeline.transformer, recipe, calibrate)
    export_hf_checkpoint(pipeline if whole else pipeline.transformer, export_dir=folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model in tiny.NAMES:
        for recipe_name, (recipe, whole) in recipes().items():
            write(Path(sys.argv[1]) / model / recipe_name, model, recipe, whole)
