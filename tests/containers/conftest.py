"""podman, and the images of this project, each built once for the tests that want it."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest

from batchyard import __version__
from tests.containers.tools import BASE, FOLDER, ROOT, Podman, make_podman

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES = ROOT / "infra" / "images"


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    """It has no container left afterwards; images stay, so that the next session is quick."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session would remove this one's containers
        podman = make_podman()
        remove_all(podman)  # what a session has left that was killed: volumes with its passwords
        yield podman
        remove_all(podman)


def remove_all(podman: Podman) -> None:
    """Remove containers, volumes and networks, not images."""
    podman.run("podman", "pod", "rm", "--all", "--force", "--time", "1")
    podman.run("podman", "rm", "--all", "--force", "--time", "1")
    podman.run("podman", "volume", "prune", "--force")
    podman.run("podman", "network", "prune", "--force")


@pytest.fixture(scope="session")
def product(podman: Podman) -> str:
    return _built(podman, "batchyard", "Containerfile", "product")


@pytest.fixture(scope="session")
def engine_cpu(podman: Podman, product: str) -> str:
    return _built(podman, "batchyard-engine-cpu", "Containerfile", "engine-cpu")


@pytest.fixture(scope="session")
def s3_image(podman: Podman) -> str:
    return _built(podman, "batchyard-s3", "s3.Containerfile")


def _built(podman: Podman, name: str, file: str, target: str | None = None) -> str:
    """The image's name, the one that the compose file has."""
    options = [f"--build-arg=BASE={BASE}"] + ([f"--target={target}"] if target else [])
    podman.build(IMAGES / file, f"{name}:{__version__}", *options)
    return f"{name}:{__version__}"
