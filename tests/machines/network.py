"""A second machine's network: a namespace that is connected to this one by a cable of its own."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class FarNetwork:
    """``address`` is its own, ``ours`` is that of this machine on the cable between them."""

    name: str
    ours: str
    address: str

    @property
    def enter(self) -> list[str]:
        """The words before a command that runs in it."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pull the cable out: nothing arrives any more, and no one is told."""
        _ip("link", "set", f"{self.name}a", "down")


@contextmanager
def far_network() -> Iterator[FarNetwork]:
    """Skips where networks cannot be made; in CI that is a failure."""
    number = random.randrange(1, 255)
    network = FarNetwork(f"byn{number}", f"10.199.{number}.1", f"10.199.{number}.2")
    if shutil.which("ip") is None:
        _unavailable("no `ip` to make networks with: install iproute2")
    try:
        _ip("netns", "add", network.name)
    except subprocess.CalledProcessError as error:
        _unavailable(f"no network namespaces: {error.stderr.strip()}")
    near, far = f"{network.name}a", f"{network.name}b"
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", network.name)
        _ip("addr", "add", f"{network.ours}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", network.name, "addr", "add", f"{network.address}/30", "dev", far)
        for device in ("lo", far):
            _ip("-n", network.name, "link", "set", device, "up")
        yield network
    finally:
        # The cable goes with it.
        _ip("netns", "delete", network.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
