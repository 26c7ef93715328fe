"""Programs from Debian's packages, without installing anything.

apt downloads the packages, and they are unpacked into a cache folder of the project, which `make
clean` removes. Where that is not possible, tests that need them are skipped, and say why: unlike
pip's and npm's packages, nothing else here needs those of the system.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".debian_cache"


def unpacked(*packages: str, name: str | None = None) -> Path:
    """The folder below which the packages' files are: ``usr/sbin`` and so on."""
    folder = CACHE / (name or "-".join(packages))
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _unpack(packages, folder)
    return folder


def unpacked_with_libraries(*packages: str, name: str | None = None) -> Path:
    """Likewise for programs, with those packages that they depend on and that are not here."""
    # Not by --print-uris, which leaves out what apt has downloaded already.
    words = ["apt-get", "install", "--simulate", "-qq", "--no-install-recommends", *packages]
    shown = ", ".join(packages)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{shown} is not here: these tests need Debian or Ubuntu.")
    if done.returncode:
        pytest.skip(f"apt has no {shown}: {done.stderr[-500:]}")
    # Lines like: Inst PACKAGE (version and origin)
    named = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("Inst ")}
    return unpacked(*sorted(named | {*packages}), name=name or packages[0])


def environment_of(folder: Path) -> dict[str, str]:
    """Variables for a program that needs libraries of the same packages."""
    # Some are in a folder of their own, which they know as one of the system's.
    files = (folder / "usr/lib").glob("*-linux-gnu/**/*.so*")
    libraries = ":".join(sorted({str(path.parent) for path in files}))
    return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": libraries}


def _unpack(packages: tuple[str, ...], folder: Path) -> None:
    """Whole or not at all."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip(f"{', '.join(packages)} is not here: these tests need Debian or Ubuntu.")
    with tempfile.TemporaryDirectory(dir=CACHE) as draft:
        words = ["apt-get", "download", *packages]
        done = subprocess.run(words, cwd=draft, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"apt cannot download {', '.join(packages)}: {done.stderr[-500:]}")
        for archive in Path(draft).glob("*.deb"):
            subprocess.run(["dpkg", "-x", archive, Path(draft) / "root"], check=True)
        (Path(draft) / "root").rename(folder)
