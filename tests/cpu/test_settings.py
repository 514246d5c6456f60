"""Settings: what each variable means, and that nonsense is an error rather than a default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import samebits
from samebits.errors import SettingsError
from samebits.settings import Settings, settings


def test_defaults_of_an_empty_environment() -> None:
    found = Settings.from_environ({})
    assert found.disabled is False
    assert found.cache_dir.is_absolute()
    assert "samebits" in found.cache_dir.name


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_kill_switch_on(value: str) -> None:
    assert Settings.from_environ({"SAMEBITS_DISABLE": value}).disabled is True


@pytest.mark.parametrize("value", ["", "0", "False", "no", "off"])
def test_kill_switch_off(value: str) -> None:
    assert Settings.from_environ({"SAMEBITS_DISABLE": value}).disabled is False


def test_a_misspelt_kill_switch_is_an_error() -> None:
    with pytest.raises(SettingsError, match="SAMEBITS_DISABLE='ture' is not understood: expected 1 or 0") as caught:
        Settings.from_environ({"SAMEBITS_DISABLE": "ture"})
    assert caught.value.variable == "SAMEBITS_DISABLE"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("value", "calls"), [("", 0), ("0", 0), ("off", 0), ("1", 1), (" 5000 ", 5000)])
def test_recheck_every(value: str, calls: int) -> None:
    assert Settings.from_environ({"SAMEBITS_RECHECK_EVERY": value}).recheck_every == calls


@pytest.mark.parametrize("value", ["-1", "1.5", "often", "yes", "1" * 30, "²"])
def test_a_number_of_calls_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(SettingsError, match=r"SAMEBITS_RECHECK_EVERY=.*expected a whole number of calls"):
        Settings.from_environ({"SAMEBITS_RECHECK_EVERY": value})


@pytest.mark.parametrize(
    ("value", "trust"),
    [
        ("", "hint"),
        ("1", "hint"),
        ("Hint", "hint"),
        ("stored", "stored"),
        (" anew", "anew"),
        ("off", "off"),
        ("0", "off"),
    ],
)
def test_certificates(value: str, trust: str) -> None:
    assert Settings.from_environ({"SAMEBITS_CERTIFICATES": value}).certificates == trust
    assert Settings.from_environ({}).certificates == "hint"


def test_a_trust_that_is_none_is_an_error() -> None:
    with pytest.raises(
        SettingsError, match=r"SAMEBITS_CERTIFICATES='trusted' is not understood: expected hint, stored"
    ):
        Settings.from_environ({"SAMEBITS_CERTIFICATES": "trusted"})


def test_cache_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environ({"SAMEBITS_CACHE_DIR": "here"}).cache_dir == tmp_path / "here"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings.from_environ({"SAMEBITS_CACHE_DIR": "~/there"}).cache_dir == tmp_path / "there"


def test_without_a_home_the_cache_goes_under_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **kwargs: "~/.cache/samebits")
    found = Settings.from_environ({}).cache_dir
    assert found.is_absolute()
    assert found.name.startswith("samebits-")


def test_settings_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SAMEBITS_DISABLE", "1")
    monkeypatch.setenv("SAMEBITS_CERTIFICATES", "stored")
    assert settings() == Settings(disabled=True, cache_dir=tmp_path, certificates="stored")
    monkeypatch.delenv("SAMEBITS_DISABLE")
    assert settings().disabled is False


def test_the_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().disabled = True  # type: ignore[misc]


def test_no_other_module_reads_the_variables() -> None:
    package = Path(samebits.__file__).parent
    reads = re.compile(r"(environ|getenv)\b[^\n]*SAMEBITS_")
    guilty = [p for p in package.rglob("*.py") if p.name != "settings.py" and reads.search(p.read_text())]
    assert guilty == []
    assert reads.search('os.environ.get("SAMEBITS_DISABLE")')
