"""``batchyard engine``: the environment of the engines, and which Python a runner takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchyard.cli import make_app
from batchyard.errors import EngineStartFailed, SettingsError
from batchyard.services.machine.engine_python import engine_python
from batchyard.settings import read_settings
from commands import shipped
from tests.contract.engine.conftest import ENGINE_PYTHON, require_vllm


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BATCHYARD_ENGINE_PYTHON", raising=False)
    return tmp_path / "home"


def engine(*words: str) -> str:
    """What the command says; the exception that it ends with, if any."""
    ended = CliRunner().invoke(make_app(), ["engine", *words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def test_an_environment_that_has_vllm_is_named_to_the_runners_of_this_home() -> None:
    require_vllm()
    assert "vLLM 0.32.0" in engine("install", "--python", str(ENGINE_PYTHON))
    assert engine_python(read_settings()) == ENGINE_PYTHON


def test_an_environment_without_vllm_is_refused_and_not_named(home: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"has no vLLM: install vLLM 0\.32 or later"):
        engine("install", "--python", sys.executable)
    assert not (home / "engine.python").exists()


def test_a_python_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="There is no Python at /no/python"):
        engine("install", "--python", "/no/python")


def test_a_python_whose_path_cannot_be_looked_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that may not be entered; root may enter every folder."""
    python = f"/{'x' * 300}/python"
    with pytest.raises(SettingsError, match=f"{python} cannot be used: File name too long."):
        engine("install", "--python", python)
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", python)
    with pytest.raises(SettingsError, match=f"{python} cannot be used: File name too long."):
        engine_python(read_settings())


def test_the_setting_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "engine.python").write_text("/chosen/python\n")
    monkeypatch.setenv("BATCHYARD_ENGINE_PYTHON", sys.executable)
    assert engine_python(read_settings()) == Path(sys.executable)


class Maker:
    """Stands in for infra/environment.sh, which installs gigabytes: a Python that has "vLLM"."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.script = folder / "environment.sh"
        self.write("0")

    def write(self, code: str) -> None:
        self.script.write_text(
            f'echo "$1" >> {self.log}\nmkdir -p "$2/bin"\nrm -f "$2/.made"\n'
            f"echo '#!/bin/sh\necho vllm-version 0.40.1' > \"$2/bin/python\"\n"
            f'chmod +x "$2/bin/python"\nexit {code}\n'
        )

    @property
    def made(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker(tmp_path)
    monkeypatch.setattr(shipped, "MAKE_ENVIRONMENT", made.script)
    return made


def test_an_environment_is_made_in_the_home_once(maker: Maker, home: Path) -> None:
    for _ in range(2):
        assert "vLLM 0.40.1" in engine("install", "--device", "cpu")
    assert maker.made == ["engine-cpu"]
    assert engine_python(read_settings()) == home / "engine" / "bin" / "python"


def test_another_device_makes_another_environment(maker: Maker) -> None:
    engine("install", "--device", "cpu")
    engine("install", "--device", "cuda")
    assert maker.made == ["engine-cpu", "engine-cuda"]


def test_an_environment_that_was_not_finished_is_made_again(maker: Maker, home: Path) -> None:
    maker.write("1")
    with pytest.raises(SettingsError, match=r"environment\.sh failed with exit code 1"):
        engine("install", "--device", "cpu")
    assert not (home / "engine.python").exists()
    maker.write("0")
    engine("install", "--device", "cpu")
    assert maker.made == ["engine-cpu", "engine-cpu"]


def test_the_tiny_models_are_made(home: Path) -> None:
    require_vllm()
    engine("install", "--python", str(ENGINE_PYTHON))
    engine("tiny-models")
    assert (home / "models" / "tiny-chat" / "config.json").is_file()
    assert (home / "models" / "tiny-embed" / "config.json").is_file()
