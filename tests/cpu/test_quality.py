"""When bits may move: the decision in full, the record that it rests on, the figures and the page."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from samebits.quality import (
    Figures,
    Pair,
    Place,
    QualityRecord,
    Thresholds,
    Unbelievable,
    decide,
    find_record,
    keep_record,
    read_record,
    write_record,
)
from samebits.quality.weights import model_hash

ENVIRONMENT = {"gpu": {"name": "a GPU", "uuid": "GPU-1"}, "driver": "580", "torch": {"version": "2.11.0"}}
SOURCES = {"bias_gated_residual": "a" * 16, "bias_gated_residual_norm_modulate": "b" * 16}


def pair(ssim: float = 0.97, psnr: float | None = 31.0, **changed: Any) -> Pair:
    given = {"prompt": "a fox", "seed": 0, "exact_sha256": "1", "measured_sha256": "2"} | changed
    return Pair(**given, figures=Figures(ssim=ssim, psnr=psnr, flip=0.02))


def record(**changed: Any) -> QualityRecord:
    given: dict[str, Any] = {
        "model": "tiny",
        "model_hash": "0123456789abcdef",
        "quantization": "modelopt FP8",
        "rounding": "eager",
        "dtype": "bfloat16",
        "capability": [9, 0],
        "environment": ENVIRONMENT,
        "sources": SOURCES,
        "steps": 4,
        "size": [256, 256],
        "pairs": [pair()],
    }
    return QualityRecord(**(given | changed))


def place(**changed: Any) -> Place:
    base = Place.of(record())
    return Place(**({name: getattr(base, name) for name in base.__dataclass_fields__} | changed))


SCHEMES = (None, "modelopt FP8", "modelopt NVFP4", "bitsandbytes")
CAPABILITIES: tuple[tuple[int, int] | None, ...] = ((9, 0), (10, 0), (10, 3), (12, 0), None)
DTYPES = ("bfloat16", "float16", "float32")
RECORDS = {
    "none": None,
    "within": lambda **at: record(**at),
    "not within": lambda **at: record(pairs=[pair(), pair(ssim=0.9499)], **at),
    "of another model": lambda **at: record(model_hash="f" * 16, **at),
    "of another scheme": lambda **at: record(**(at | {"quantization": "some other"})),
    "of another capability": lambda **at: record(**(at | {"capability": [8, 9]})),
    "of another environment": lambda **at: record(environment=ENVIRONMENT | {"driver": "581"}, **at),
    "of other kernels": lambda **at: record(sources={**SOURCES, "bias_gated_residual": "c" * 16}, **at),
    "of another rounding": lambda **at: record(rounding="fma", **at),
}
TABLE = list(itertools.product(SCHEMES, CAPABILITIES, RECORDS, DTYPES))


@pytest.mark.parametrize("contract", ["exact", "measured"])
def test_the_whole_table(contract: str) -> None:
    """Scheme x capability x record x dtype: only a record for exactly this place, within the thresholds, allows it."""
    allowed = []
    for scheme, capability, name, dtype in TABLE:
        make = RECORDS[name]
        at = {
            "quantization": scheme or "",
            "capability": None if capability is None else list(capability),
            "dtype": dtype,
        }
        found = decide(
            contract,
            place(quantization=scheme, capability=capability, dtype=dtype),
            None if make is None else make(**at),
        )
        assert found.reason
        if found.allowed:
            allowed.append((scheme, capability, name, dtype))
    expected = [] if contract == "exact" else [row for row in TABLE if row[0] is not None and row[2] == "within"]
    assert allowed == expected
    assert len(TABLE) == 4 * 5 * 9 * 3


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_capability_alone_decides_nothing(capability: tuple[int, int] | None) -> None:
    """Not even that of the architecture on which others measured it."""
    at = place(capability=capability)
    assert not decide("measured", at, None).allowed
    assert "run samebits quality" in decide("measured", at, None).reason
    other = record(capability=[7, 5])
    assert "compute capability" in decide("measured", at, other).reason


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_hash": "f" * 16}, "other weights"),
        ({"quantization": "modelopt NVFP4"}, "another scheme"),
        ({"rounding": "fma"}, "another rounding"),
        ({"dtype": "float16"}, "another dtype"),
        ({"capability": None}, "compute capability"),
        ({"sources": {}}, "other kernels"),
        ({"environment": {}}, "another environment"),
    ],
)
def test_why_not(changed: dict[str, Any], words: str) -> None:
    assert decide("measured", place(), record()).allowed
    found = decide("measured", place(**changed), record())
    assert not found.allowed
    assert words in found.reason


def test_thresholds_hold_for_every_picture() -> None:
    good, identical = pair(), pair(1.0, None)
    assert decide("measured", place(), record(pairs=[good, identical])).allowed
    for bad, words in ((pair(ssim=0.9499), "SSIM 0.9499"), (pair(psnr=28.99), "PSNR 28.99"), (pair(ssim=math.nan), "")):
        found = decide("measured", place(), record(pairs=[good, bad, identical]))
        assert not found.allowed
        assert words in found.reason
    assert decide("measured", place(), record(pairs=[pair(0.5, 10.0)]), Thresholds(0.5, 10.0)).allowed
    assert not decide("measured", place(), record(pairs=[pair(0.5, 10.0)]), Thresholds(0.5, 10.01)).allowed
    assert "identical" not in decide("measured", place(), record(pairs=[identical])).reason


def test_no_such_contract() -> None:
    with pytest.raises(ValueError, match="exact, measured"):
        decide("fast", place(), record())


def test_worst_and_mean() -> None:
    made = record(pairs=[pair(0.96, 30.0), pair(0.98, 40.0), pair(1.0, None)])
    assert (made.worst.ssim, made.worst.psnr, made.mean.psnr) == (0.96, 30.0, 35.0)
    assert record(pairs=[pair(1.0, None)]).worst.psnr is None
    assert json.dumps(made.to_json(), allow_nan=False)


# The file.


def test_there_and_back(tmp_path: Path) -> None:
    path = keep_record(tmp_path, record())
    assert read_record(path) == record()
    assert find_record(tmp_path, place()) == record()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    assert find_record(tmp_path, place(model_hash="f" * 16)) is None
    assert find_record(tmp_path, place(environment={})) is None
    assert find_record(tmp_path / "nowhere", place()) is None


GOOD = msgspec.json.encode(record())
BROKEN = {
    "empty": b"",
    "random": bytes(range(256)),
    "cut off": GOOD[:-20],
    "another schema": b'{"a": 1}',
    "a list": b"[]",
    "future version": GOOD.replace(b'"version":1', b'"version":2'),
    "no pairs": GOOD.replace(GOOD[GOOD.index(b'"pairs":[') : GOOD.index(b'],"command')], b'"pairs":['),
    "nan": GOOD.replace(b"0.97", b"NaN"),
    "1e999": GOOD.replace(b"0.97", b"1e999"),
    "out of range": GOOD.replace(b"0.97", b"1.5"),
    "unknown field": GOOD.replace(b'{"format"', b'{"more":1,"format"'),
    "deep": b'{"environment":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_believed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keep_record(tmp_path, record())
    path.write_bytes(BROKEN[name])
    with pytest.raises(Unbelievable, match="is no quality record"):
        read_record(path)
    assert find_record(tmp_path, place()) is None
    assert [str(path) in line.getMessage() for line in caplog.records] == [True]


def test_too_large_or_a_folder(tmp_path: Path) -> None:
    large, folder = tmp_path / "large.json", tmp_path / "folder.json"
    large.write_bytes(b" " * (17 << 20))
    folder.mkdir()
    with pytest.raises(Unbelievable, match="larger than 16 MiB"):
        read_record(large)
    with pytest.raises(Unbelievable, match="cannot be read"):
        read_record(folder)


def a_link(path: Path) -> None:
    good = path.with_name("elsewhere.json")
    path.rename(good)
    path.symlink_to(good)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [a_link, a_pipe, a_folder], ids=lambda f: f.__name__)
def test_what_is_no_plain_file(put: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keep_record(tmp_path, record())
    put(path)
    assert find_record(tmp_path, place()) is None
    assert ["cannot be read (" in line.getMessage() for line in caplog.records] == [True]


def test_a_cache_that_may_not_be_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_record(tmp_path, record())

    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        for name in ("open", "stat"):
            patch.setattr(os, name, forbidden)
        assert find_record(tmp_path, place()) is None
    assert ["Permission denied" in line.getMessage() for line in caplog.records] == [True]


def test_a_long_prompt_can_be_read_again(tmp_path: Path) -> None:
    long = record(pairs=[pair(prompt="\u72d0" * 32_768)])
    assert read_record(keep_record(tmp_path, long)) == long
    with pytest.raises(Unbelievable):
        read_record(keep_record(tmp_path, record(pairs=[pair(prompt="a" * 32_769)])))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_record(record(), path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_record(record(model="other"), path)
    assert read_record(path) == record()
    assert [other.name for other in tmp_path.iterdir()] == [path.name]


# The hash of a model.


def net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    module.register_buffer("bytes", torch.arange(13, dtype=torch.uint8))
    module.register_buffer("eight", torch.randn(7).to(torch.float8_e4m3fn))
    return module


def change_one_bit(module: Any) -> None:
    module[0].weight.data.view(torch.int32)[2, 4] ^= 1


def swap_two(module: Any) -> None:
    module.bytes[[0, 1]] = module.bytes[[1, 0]]


def rename(module: Any) -> None:
    module.register_buffer("other", module.bytes)
    del module._buffers["bytes"]


def change_dtype(module: Any) -> None:
    module.bytes = module.bytes.view(torch.int8)


@pytest.mark.parametrize("change", [change_one_bit, swap_two, rename, change_dtype], ids=lambda f: f.__name__)
def test_another_model_has_another_hash(change: Any) -> None:
    module = net()
    assert model_hash(module) == model_hash(net())
    change(module)
    assert model_hash(module) != model_hash(net())


def test_a_view_into_a_larger_storage() -> None:
    """As safetensors gives them: it may begin at any byte."""
    hashes = []
    for start in (0, 3, 8):
        module = nn.Module()
        storage = torch.zeros(64, dtype=torch.uint8)
        storage[start : start + 16] = torch.arange(16, dtype=torch.uint8)
        module.register_buffer("bytes", storage[start : start + 16])
        hashes.append(model_hash(module))
    assert len(set(hashes)) == 1


def test_layout_is_no_content() -> None:
    module = net()
    before = model_hash(module)
    weight: Any = module[0]  # type: ignore[index]
    weight.weight.data = weight.weight.data.t().contiguous().t()
    assert model_hash(module) == before


# The figures.


def picture(seed: int, noise: float = 0.0) -> Image.Image:
    random = np.random.default_rng(7)
    base = np.kron(random.random((8, 8, 3)), np.ones((16, 16, 1)))
    base = base + noise * np.random.default_rng(seed).standard_normal(base.shape)
    return Image.fromarray((np.clip(base, 0, 1) * 255).astype(np.uint8))


def test_figures() -> None:
    metrics = pytest.importorskip("samebits.quality.metrics")
    if metrics.missing_packages():
        pytest.skip(metrics.missing_packages())
    same, maps = metrics.figures(picture(0), picture(0))
    assert (same.psnr, same.flip) == (None, 0.0)
    assert same.ssim == pytest.approx(1.0, abs=1e-3)
    assert maps.shape == (128, 128, 3)
    near, far = (metrics.figures(picture(1, noise), picture(0))[0] for noise in (0.01, 0.2))
    assert 1 > near.ssim > far.ssim
    assert near.psnr > far.psnr
    assert 0 < near.flip < far.flip
    one = np.asarray(picture(0), dtype=np.float64)
    other = np.asarray(picture(1, 0.2), dtype=np.float64)
    assert far.psnr == pytest.approx(10 * math.log10(255**2 / ((one - other) ** 2).mean()), rel=1e-4)
    if metrics.lpips_weights() is None:
        assert far.lpips is None
    with pytest.raises(ValueError, match="at least 8 pixels"):
        metrics.figures(picture(0).resize((5, 64)), picture(0).resize((5, 64)))
    with pytest.raises(ValueError, match="one size"):
        metrics.figures(picture(0), picture(0).resize((64, 64)))


def test_the_sheet_and_the_page() -> None:
    pages = pytest.importorskip("samebits.quality.page")
    pytest.importorskip("jinja2")
    maps = np.zeros((128, 128, 3), dtype=np.float32)
    shown = [pages.Shown(f"seed {n} <b>", picture(0), picture(n, 0.1), maps) for n in range(3)]
    image = pages.sheet(shown)
    assert image.height > 3 * pages.THUMBNAIL
    assert pages.panels(shown[1])[2].getextrema() != ((128, 128),) * 3
    nothing = pages.panels(pages.Shown("", picture(0), picture(0), maps))[2]
    assert nothing.getextrema() == ((128, 128),) * 3
    good = pages.page(record(), Thresholds(), shown)
    bad = pages.page(record(pairs=[pair(0.5, None)]), Thresholds(), shown)
    assert "Within the thresholds" in good
    assert "Not within the thresholds" in bad
    assert "SSIM 0.5000 is below 0.95" in bad
    assert good.count("data:image/png;base64,") == 12
    assert "seed 0 &lt;b&gt;" in good
    assert "http://" not in good.replace("http://www.w3.org", "")
    assert "https://" not in good
