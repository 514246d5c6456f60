"""Exports that are broken or hostile: one clear error that names file and tensor, before anything is built."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from samebits import tiny
from samebits.errors import CheckpointError
from samebits.quant import check_scales, linear, load, loader, read_export

FP8 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
FILE = "diffusion_pytorch_model.safetensors"
QKV = "transformer_blocks.1.attn.to_q"
Tensors = dict[str, Tensor]


@pytest.fixture
def fp8(exports: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports / tiny.NAMES[0] / "FP8/transformer", tmp_path / "fp8"))


@pytest.fixture
def nvfp4(exports: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports / tiny.NAMES[0] / "NVFP4/transformer", tmp_path / "nvfp4"))


@pytest.fixture
def building() -> None:
    """Asked for by the test that may build."""


@pytest.fixture(autouse=True)
def _nothing_is_built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read, and no quantised linear made that has memory."""
    if "building" not in request.fixturenames:
        monkeypatch.setattr(loader, "safe_open", lambda *_, **__: pytest.fail("a weight was read"))
        zeros = torch.zeros

        def on_meta(*sizes: Any, **options: Any) -> Tensor:
            assert torch.device(options.get("device") or "cpu").type == "meta", "memory was taken for a weight"
            return zeros(*sizes, **options)

        monkeypatch.setattr(linear.torch, "zeros", on_meta)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder / FILE


def refuse(folder: Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    for part in parts:
        assert part in message, message
    return message


def put_all(**values: Tensor) -> Callable[[Tensors], Any]:
    """Tensors of ``QKV``, made now and put in later."""
    return lambda tensors: tensors.update({f"{QKV}.{name}": value for name, value in values.items()})


def put(name: str, value: Tensor | None) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        assert name in tensors or value is not None
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return change


FP8_HARMS = [
    (put(f"{QKV}.weight_scale", None), f"tensor {QKV}.weight_scale is missing, but {QKV}.weight is F8_E4M3"),
    (put(f"{QKV}.weight_scale", torch.tensor(NAN)), f"tensor {QKV}.weight_scale is nan; expected a number above zero"),
    (put(f"{QKV}.weight_scale", torch.tensor(0.0)), f"tensor {QKV}.weight_scale is 0;"),
    (put(f"{QKV}.weight_scale", torch.tensor(-0.0)), f"tensor {QKV}.weight_scale is -0;"),
    (put(f"{QKV}.weight_scale", torch.tensor(-2.0)), f"tensor {QKV}.weight_scale is -2;"),
    (put(f"{QKV}.weight_scale", torch.tensor(INF)), f"tensor {QKV}.weight_scale is inf;"),
    (put(f"{QKV}.input_scale", torch.tensor(-1.0)), f"tensor {QKV}.input_scale is -1;"),
    (put(f"{QKV}.weight_scale", torch.ones(3)), f"tensor {QKV}.weight_scale is F32 (3,); expected F32, one number or"),
    (put(f"{QKV}.weight_scale", torch.ones(1, 128)), f"tensor {QKV}.weight_scale is F32 (1, 128)"),
    (put(f"{QKV}.weight_scale", torch.ones(()).half()), f"tensor {QKV}.weight_scale is F16 ()"),
    (put(f"{QKV}.weight_scale", torch.arange(-5.0, 123.0)), f"tensor {QKV}.weight_scale is -5 at (0,)"),
    (put(f"{QKV}.weight_scale", torch.arange(128.0).flip(0)), f"tensor {QKV}.weight_scale is 0 at (127,)"),
    (put(f"{QKV}.input_scale", torch.ones(2)), f"tensor {QKV}.input_scale is F32 (2,); expected one number, F32"),
    (put(f"{QKV}.input_scale", torch.ones((), dtype=torch.int32)), f"tensor {QKV}.input_scale is I32 ()"),
    (put(f"{QKV}.weight_scale_2", torch.ones(())), f"tensor {QKV}.weight_scale_2 is there, but an FP8 weight"),
    (put(f"{QKV}.weight", torch.zeros(128, 64).to(FP8)), f"tensor {QKV}.weight is F8_E4M3 (128, 64) for (128, 64)"),
    (put(f"{QKV}.weight", torch.zeros(128, 128, 1).to(FP8)), f"tensor {QKV}.weight is F8_E4M3 (128, 128, 1)"),
    (put(f"{QKV}.weight", torch.zeros(0, 128).to(FP8)), f"tensor {QKV}.weight is F8_E4M3 (0, 128)"),
    (put(f"{QKV}.weight", torch.zeros(128, 128).to(torch.float8_e5m2)), f"tensor {QKV}.weight is F8_E5M2"),
    (put(f"{QKV}.weight", torch.zeros(128, 128, dtype=torch.int8)), f"tensor {QKV}.weight is I8"),
    (put(f"{QKV}.weight", torch.zeros(128, 128)), f"tensor {QKV}.weight is F32, yet there is a {QKV}.weight_scale"),
    (put(f"{QKV}.weight", None), f"{QKV}.weight is not"),
    (put(f"{QKV}.bias", None), f"the weights hold no {QKV}.bias"),
    (put(f"{QKV}.bias", torch.zeros(64)), f"tensor {QKV}.bias is (64,); the configuration says (128,)"),
    (put(f"{QKV}.bias", torch.zeros(128).to(FP8)), f"tensor {QKV}.bias is F8_E4M3, and is no weight of a linear"),
    (put("proj_out.weight", None), "the weights hold no proj_out.weight"),
    (
        put("proj_out.weight_scale", torch.ones(())),
        "tensor proj_out.weight is BF16, yet there is a proj_out.weight_scale",
    ),
    (put("proj_out.weight", torch.zeros(64, 128).to(FP8)), "tensor proj_out.weight_scale is missing"),
    (
        put("something.else", torch.zeros(2)),
        "tensor something.else belongs to nothing in a QwenImageTransformer2DModel",
    ),
    (put("lonely.weight_scale", torch.ones(())), "tensor lonely.weight_scale is there, but lonely.weight is not"),
    (put(f"{QKV}.pre_quant_scale", torch.ones(128)), f"tensor {QKV}.pre_quant_scale: smoothing"),
    (put(f"{QKV}.svdquant_lora_a", torch.ones(4, 128)), f"tensor {QKV}.svdquant_lora_a: SVDQuant is not supported"),
    (put(f"{QKV}.weight_quantizer._amax", torch.ones(())), "_amax: this is ModelOpt's own checkpoint"),
    (
        lambda tensors: tensors.update(
            {"txt_norm.weight": torch.ones(128, 1).to(FP8), "txt_norm.weight_scale": torch.ones(())}
        ),
        "tensor txt_norm.weight is F8_E4M3, but txt_norm is a RMSNorm, not a Linear",
    ),
    (
        lambda tensors: tensors.update(
            {"no.such.weight": torch.ones(16, 16).to(FP8), "no.such.weight_scale": torch.ones(())}
        ),
        "tensor no.such.weight belongs to no module of a QwenImageTransformer2DModel",
    ),
]


@pytest.mark.parametrize(("harm", "complaint"), FP8_HARMS, ids=[complaint for _, complaint in FP8_HARMS])
def test_an_fp8_export_with_one_thing_wrong(fp8: Path, harm: Callable[[Tensors], Any], complaint: str) -> None:
    rewrite(fp8, harm)
    refuse(fp8, complaint)


def scales(value: float, at: tuple[int, int]) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        numbers = tensors[f"{QKV}.weight_scale"].float()
        numbers[at] = value
        tensors[f"{QKV}.weight_scale"] = numbers.to(FP8)

    return change


NVFP4_HARMS = [
    (put(f"{QKV}.weight_scale_2", None), f"tensor {QKV}.weight_scale_2 is missing, but {QKV}.weight is packed E2M1"),
    (put(f"{QKV}.weight_scale", None), f"tensor {QKV}.weight_scale is missing, but {QKV}.weight is U8"),
    (put(f"{QKV}.weight_scale_2", torch.tensor(NAN)), f"tensor {QKV}.weight_scale_2 is nan;"),
    (put(f"{QKV}.weight_scale_2", torch.tensor(0.0)), f"tensor {QKV}.weight_scale_2 is 0;"),
    (put(f"{QKV}.weight_scale_2", torch.tensor(-1.0)), f"tensor {QKV}.weight_scale_2 is -1;"),
    (put(f"{QKV}.weight_scale_2", torch.ones(128)), f"tensor {QKV}.weight_scale_2 is F32 (128,); expected one number"),
    (put(f"{QKV}.input_scale", torch.tensor(NAN)), f"tensor {QKV}.input_scale is nan;"),
    (scales(NAN, (17, 3)), f"tensor {QKV}.weight_scale is nan at (17, 3); expected a number above zero"),
    (scales(0.0, (127, 7)), f"tensor {QKV}.weight_scale is 0 at (127, 7)"),
    (scales(-0.0, (0, 0)), f"tensor {QKV}.weight_scale is -0 at (0, 0)"),
    (scales(-1.75, (1, 0)), f"tensor {QKV}.weight_scale is -1.75 at (1, 0)"),
    (put(f"{QKV}.weight_scale", torch.ones(128, 4).to(FP8)), f"tensor {QKV}.weight_scale is F8_E4M3 (128, 4)"),
    (put(f"{QKV}.weight_scale", torch.ones(128, 8)), f"tensor {QKV}.weight_scale is F32 (128, 8)"),
    (put(f"{QKV}.weight", torch.zeros(128, 63, dtype=torch.uint8)), "126 columns are no multiple of 16"),
    (put(f"{QKV}.weight", torch.zeros(144, 64, dtype=torch.uint8)), f"tensor {QKV}.weight_scale is F8_E4M3 (128, 8)"),
    (put(f"{QKV}.weight", torch.zeros(128, 64).to(FP8)), f"tensor {QKV}.weight_scale_2 is there, but an FP8"),
    (
        put_all(weight=torch.zeros(144, 64, dtype=torch.uint8), weight_scale=torch.ones(144, 8).to(FP8)),
        f"tensor {QKV}.weight is U8 (144, 64) for (144, 128); the configuration says (128, 128)",
    ),
]


@pytest.mark.parametrize(("harm", "complaint"), NVFP4_HARMS, ids=[complaint for _, complaint in NVFP4_HARMS])
def test_an_nvfp4_export_with_one_thing_wrong(nvfp4: Path, harm: Callable[[Tensors], Any], complaint: str) -> None:
    rewrite(nvfp4, harm)
    refuse(nvfp4, complaint)


@pytest.mark.usefixtures("building")
def test_the_exports_that_are_harmed_are_whole(fp8: Path, nvfp4: Path) -> None:
    """Else all of the above could fail for a reason of their own."""
    for folder in (fp8, nvfp4):
        rewrite(folder, lambda tensors: None)
        load(folder)
    rewrite(nvfp4, scales(1.75, (1, 0)))
    load(nvfp4)


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quant_algo": "INT8_SQ"}, "quant_algo 'INT8_SQ' is not supported; expected one of FP8, "),
        ({"quant_algo": None}, "quant_algo 'None' is not supported"),
        ({"quant_algo": ["FP8"]}, "is not supported"),
        ({"quant_algo": "x" * 10_000}, "is not supported"),
        ({"quant_algo": "NVFP4"}, "is F8_E4M3, which is not what config.json calls NVFP4"),
        ({"quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD' is not supported"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"img_in": {"quant_algo": "MXFP8"}}}, "layer img_in: "),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"img_in": 3}}, "layer img_in: quant_algo '3'"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"img_in": {"quant_algo": "NVFP4"}}},
            "tensor img_in.weight is F8_E4M3, which is not what config.json calls NVFP4",
        ),
        ({"ignore": ["transformer_blocks.1*"]}, "leaves transformer_blocks.1."),
        ({"ignore": "proj_out"}, "ignore is malformed: proj_out"),
        ({"ignore": [1]}, "ignore is malformed"),
        ({"config_groups": []}, "no weight"),
        ({"config_groups": ["a"]}, "config_groups is malformed"),
        ({"config_groups": {"group_0": {"weights": 8}}}, "config_groups.group_0.weights is malformed: 8"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}, "expected floats of 8 bits"),
        ({"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}}, "in groups of 16, got"),
        (
            {"config_groups": {"g": {"input_activations": {"num_bits": [8]}}}},
            "config_groups.g.input_activations: expected",
        ),
    ],
)
def test_a_configuration_with_one_thing_wrong(fp8: Path, changes: dict[str, Any], complaint: str) -> None:
    configure(fp8, **changes)
    if changes == {"config_groups": []}:
        rewrite(fp8, lambda tensors: [tensors.pop(name) for name in list(tensors) if "scale" in name] and None)
        complaint = "weight_scale is missing"
    message = refuse(fp8, complaint)
    assert len(message) < 600


def test_a_configuration_that_says_more_than_the_files_hold(fp8: Path) -> None:
    def plain(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith("_scale"):
                del tensors[name]
            else:
                tensors[name] = tensors[name].to(torch.bfloat16)

    rewrite(fp8, plain)
    refuse(fp8, "config.json: says FP8, but no weight beside it is quantised")


def test_a_configuration_that_is_no_object(fp8: Path) -> None:
    config = json.loads((fp8 / "config.json").read_text())
    for value in (3, "modelopt", [1]):
        (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": value}))
        refuse(fp8, "quantization_config is a", "expected an object")


@pytest.mark.usefixtures("building")
def test_quantised_weights_of_which_nothing_says_so(fp8: Path) -> None:
    """diffusers would cast them and leave the scales out: another model, and no error."""
    config = json.loads((fp8 / "config.json").read_text())
    del config["quantization_config"]
    (fp8 / "config.json").write_text(json.dumps(config))
    careless = QwenImageTransformer2DModel.from_pretrained(fp8, dtype=torch.bfloat16)
    assert float(careless.img_in.weight.detach().abs().max()) == 448.0
    refuse(fp8, "weight_scale is there, but neither config.json nor hf_quant_config.json names a quantisation")


def test_two_configurations_that_contradict_each_other(fp8: Path) -> None:
    beside = fp8 / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    refuse(fp8, "hf_quant_config.json: quant_algo is 'NVFP4', and 'FP8' in config.json")
    beside.write_text(json.dumps({"quantization": 3}))
    refuse(fp8, "hf_quant_config.json: has no quantization")
    beside.write_text('{"a": 1, "a": 2}')
    refuse(fp8, "hf_quant_config.json", "'a' is in it twice")
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    configure(fp8, quant_method="torchao")
    refuse(fp8, "quant_method is 'torchao', but a hf_quant_config.json")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"num_layers": "two"}, "cannot be loaded"),
        ({"num_attention_heads": None}, "cannot be loaded"),
        ({"num_layers": 3}, "the weights hold no transformer_blocks.2."),
        ({"num_layers": 1}, "transformer_blocks.1."),
        ({"num_attention_heads": 3}, "the configuration says"),
    ],
)
def test_a_model_that_the_configuration_does_not_describe(fp8: Path, config: dict[str, Any], complaint: str) -> None:
    whole = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**whole, **config}))
    refuse(fp8, complaint)
    assert torch.get_default_dtype() is torch.float32


# The file itself


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(path: Path, head: Any, data: bytes, length: int | None = None) -> None:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_files_that_cannot_be(fp8: Path) -> None:
    path = fp8 / FILE
    head, data = header(path)
    name = f"{QKV}.weight"
    begin, end = head[name]["data_offsets"]

    def with_entry(**changes: Any) -> dict[str, Any]:
        return {**head, name: {**head[name], **changes}}

    twice = json.dumps(head)[:-1] + f', "{name}": {json.dumps(head[name])}}}'
    for made, length, complaint in (
        (head, 1 << 40, "a header of 1099511627776 bytes in a file of"),
        (head, (1 << 64) - 1, "a header of 18446744073709551615 bytes"),
        (with_entry(data_offsets=[begin - 8, end - 8]), None, "overlap or leave a hole"),
        (with_entry(data_offsets=[-8, end - begin - 8]), None, f"tensor {name}: its description is malformed"),
        (with_entry(data_offsets=[end, begin]), None, f"tensor {name}"),
        (with_entry(data_offsets=[begin, end + (1 << 60)]), None, f"tensor {name} ends at byte"),
        (with_entry(shape=[128, 127]), None, f"tensor {name}: F8_E4M3 [128, 127] needs 16256 bytes, not 16384"),
        (with_entry(shape=[-128, -128]), None, f"tensor {name}: its description is malformed"),
        (with_entry(dtype="F32"), None, f"tensor {name}: F32 [128, 128] needs 65536 bytes, not 16384"),
        (with_entry(dtype="F8_E9M9"), None, f"tensor {name}: its description is malformed"),
        (twice.encode(), None, f"'{name}' is in it twice"),
        (b"\x80\x04\x95", None, "is not JSON"),
    ):
        write(path, made, data, length)
        refuse(fp8, FILE, complaint)
    write(path, head, data[:-1])
    refuse(fp8, FILE, "the file is cut off")
    path.unlink()
    refuse(fp8, FILE, "the file is missing")


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickles_are_refused_by_name(fp8: Path, ending: str) -> None:
    (fp8 / FILE).rename(fp8 / f"diffusion_pytorch_model.{ending}")
    refuse(fp8, f"only pickle files (diffusion_pytorch_model.{ending}) are here")


def test_an_index_that_points_to_a_pickle_or_out_of_its_folder(fp8: Path) -> None:
    index = fp8 / f"{FILE}.index.json"
    for place in ("model.bin", "../x.safetensors", "/etc/passwd", ""):
        index.write_text(json.dumps({"weight_map": {"a": place}}))
        refuse(fp8, "index.json", f"points to {place!r}; expected a .safetensors file in its own folder")
    index.write_text(json.dumps({"weight_map": {"not.there": FILE}}))
    refuse(fp8, "tensor not.there is missing")
    index.write_text(json.dumps({"weight_map": []}))
    refuse(fp8, "has no weight_map")


def test_reading_headers_and_scales_needs_no_model(nvfp4: Path) -> None:
    """The scales of a big file are read in pieces; a bad one in a later piece has its own place."""
    export = read_export(nvfp4)
    assert export is not None
    check_scales(export)
    rewrite(nvfp4, scales(-3.0, (100, 5)))
    export = read_export(nvfp4)
    assert export is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samebits.quant._export_files._CHUNK_BYTES", 64)
        with pytest.raises(CheckpointError, match=r"weight_scale is -3 at \(100, 5\)"):
            check_scales(export)
