"""Real servers in environments of their own, which are made once and kept outside the repository.

``BATCHYARD_TEST_ENGINES`` names another folder for them than the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE: Final = Path(__file__).resolve().parent
MODELS: Final = HERE.parents[1] / ".models"
CACHE: Final = Path(
    os.environ.get("BATCHYARD_TEST_ENGINES")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchyard-test-engines"
)
TORCH: Final = "torch==2.13.0"
GGUF: Final = "gguf==0.19.0"
LLAMA_LIBRARY: Final = "@node-llama-cpp/linux-x64@3.19.1"
"""llama-cpp-python is only packaged as source, and its library takes long to compile. This package
has that library compiled, with the layout of structures that this llama-cpp-python expects."""
NO_LIBRARY: Final = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
START_SECONDS: Final = 240.0


class Server(NamedTuple):
    """``command`` is what its Python runs; ``{port}``, ``{model}`` and ``{file}`` are put in."""

    requirements: tuple[str, ...]
    command: tuple[str, ...]
    model: str
    ready: str = "/v1/models"
    build: Mapping[str, str] = MappingProxyType({})
    """Variables of pip's environment."""


SERVERS: Final = {
    "llama-cpp-python": Server(
        ("llama-cpp-python[server]==0.3.33", GGUF),
        (
            str(HERE / "serve_llama_cpp_python.py"),
            *("--model", "{file}", "--model_alias", "tiny-chat", "--n_ctx", "2048"),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
        "tiny-chat",
        build=NO_LIBRARY,
    ),
    "llama-server": Server(
        ("xllamacpp==2026.9.11063", GGUF),
        (str(HERE / "serve_llama_cpp.py"), "{file}", "{port}"),
        "tiny-chat",
    ),
    "transformers-serve": Server(
        ("transformers[serving]==5.24.0", TORCH),
        (
            *("-m", "transformers.cli.transformers", "serve", "tiny-chat", "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", "{port}"),
        ),
        "tiny-chat",
    ),
    "infinity": Server(
        ("infinity-emb[server,torch]==0.0.78", TORCH),
        (
            "-c",
            "from infinity_emb.cli import cli; cli()",
            *("v2", "--model-id", "tiny-embed", "--served-model-name", "tiny-embed"),
            *("--engine", "torch", "--device", "cpu", "--no-bettertransformer"),
            *("--no-model-warmup", "--host", "127.0.0.1", "--port", "{port}"),
        ),
        "tiny-embed",
        ready="/models",
    ),
}


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[str]:
    """The URL of a server that runs with its log in ``folder``."""
    server, python = SERVERS[name], environment(name)
    port = free_port()
    file = folder / "tiny-chat.gguf"
    if GGUF in server.requirements:
        write = [str(python), str(HERE / "tiny_gguf.py"), str(MODELS / "tiny-chat"), str(file)]
        subprocess.run(write, check=True)
    command = [each.format(port=port, file=file) for each in server.command]
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / f"{name}.log").open("w") as log,
        subprocess.Popen(
            [str(python), *command],
            cwd=MODELS,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_variables(name)},
        ) as process,
    ):
        try:
            _wait(url + server.ready, process)
            yield url
        finally:
            process.kill()


def environment(name: str) -> Path:
    """Its Python, with the pinned packages. What is complete is not made again."""
    server = SERVERS[name]
    mark = hashlib.sha256("\n".join((*server.requirements, LLAMA_LIBRARY)).encode()).hexdigest()
    folder = CACHE / f"{name}-{mark[:12]}"
    python, done = folder / "bin" / "python", folder / ".made"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", *server.requirements]
        subprocess.run(install, check=True, env={**os.environ, **server.build})
        if server.build is NO_LIBRARY:
            _unpack_library(folder / "llama")
        done.touch()
    return python


def _unpack_library(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", LLAMA_LIBRARY], check=True, cwd=folder)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (libraries,) = folder.glob("package/bins/*")
    for name in ("libllama", "libggml"):
        (target,) = libraries.glob(f"{name}.[bv]*.so")
        (libraries / f"{name}.so").symlink_to(target.name)


def _variables(name: str) -> dict[str, str]:
    libraries = environment(name).parents[1] / "llama" / "package" / "bins" / "linux-x64"
    return {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LLAMA_CPP_LIB_PATH": str(libraries),
    }


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE * START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310
            return
        time.sleep(0.5)
    raise AssertionError(f"{url} does not answer")
