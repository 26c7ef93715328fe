"""``batchyard engine``: the Python environment that has vLLM, on this machine."""

from __future__ import annotations

import enum
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchyard.cli.terminal.say import say
from batchyard.engine.vllm.vllm_version import vllm_version
from batchyard.errors import SettingsError
from batchyard.services.machine.engine_python import engine_python, record_engine_python
from batchyard.services.machine.home import in_home
from batchyard.settings import read_settings
from batchyard.settings_sources import is_file
from commands import shipped

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY_MODELS = ("tiny-chat", "tiny-embed")


class Device(enum.StrEnum):
    """What the engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


engine = typer.Typer(help="Install vLLM for the engines of this machine.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands; an entry point of the group ``batchyard.commands``."""
    app.add_typer(engine, name="engine")


@engine.command()
def install(
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda if there is an NVIDIA GPU, otherwise cpu.")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Use an environment that has vLLM already: the path of its Python. "
            "Nothing is installed.",
        ),
    ] = None,
) -> None:
    """Make the environment that engines on this machine run in, in BATCHYARD_HOME.

    Runners of this home use it from then on. If it is up to date, nothing is done.
    """
    if python is not None and device is not None:
        raise typer.BadParameter("Give --device or --python, not both.", param_hint="--python")
    settings = read_settings()
    with in_home(settings) as home:
        pass  # before anything is installed
    if python is None:
        python = _installed(home / "engine", device or _device())
    python = python.expanduser().absolute()
    if not is_file(python):
        raise SettingsError(f"There is no Python at {python}.")
    version = vllm_version(python, os.environ)
    with in_home(settings):
        record_engine_python(home, python)
    say(f"Engines of {home} run on vLLM {version or 'of an unknown version'}: {python}")


@engine.command("tiny-models")
def tiny_models(
    folder: Annotated[
        Path | None, typer.Argument(help="Default: the folder models in BATCHYARD_HOME.")
    ] = None,
) -> None:
    """Make two tiny models with random weights, to try everything without a GPU or a download."""
    settings = read_settings()
    folder = (folder or settings.home_folder / "models").expanduser().absolute()
    _run([engine_python(settings), shipped.MAKE_TINY_MODELS, folder], os.environ)
    for name in TINY_MODELS:
        say(str(folder / name))


def _device() -> Device:
    tool = shutil.which("nvidia-smi")
    has_gpu = tool and not subprocess.run([tool, "-L"], capture_output=True, check=False).returncode
    return Device.CUDA if has_gpu else Device.CPU


def _installed(folder: Path, device: Device) -> Path:
    """The Python of the environment in ``folder``, which is made where it is not up to date."""
    python = folder / "bin" / "python"
    stamp = folder / ".made"  # written last: an installation that was interrupted has none
    wanted = f"{device} {_digest(device)}\n"
    if not (stamp.is_file() and stamp.read_text() == wanted and python.exists()):
        words: list[str | Path] = ["bash", shipped.MAKE_ENVIRONMENT, f"engine-{device}", folder]
        _run(words, os.environ | {"PYTHON": sys.executable})
        stamp.write_text(wanted)
    return python


def _digest(device: Device) -> str:
    """The digest of the lists from which the environment is made."""
    digest = hashlib.sha256()
    for path in sorted(_lists(device)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _lists(device: Device) -> Iterator[Path]:
    for path in shipped.ENGINE_LISTS.iterdir():
        if path.stem.endswith(f"-{device}") and path.suffix in {".txt", ".pth"}:
            yield path


def _run(words: list[str | Path], environment: dict[str, str] | os._Environ[str]) -> None:
    """Its output is the terminal's. Raises SettingsError where it fails; it has said why."""
    if code := subprocess.run(words, env=environment, check=False).returncode:
        raise SettingsError(f"{Path(words[1]).name} failed with exit code {code}; see above.")
