"""Services that several parts of the suite use: each is started once, when it is first wanted."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpcore2
import hypothesis
import pytest
from httpx._transports import default

from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.store.schema import upgrade
from tests.services.swift import BUCKET, swift_for_session
from tests.side_by_side import (  # noqa: F401 - hooks of pytest's
    pytest_collection_modifyitems,
    pytest_configure_node,
    pytest_itemcollected,
    pytest_runtest_protocol,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchyard.storage.bucket import S3Credentials

_START = Path(__file__).parent / "services" / "start"
"""What it says is in its ``sitecustomize.py``."""


def pytest_configure(config: pytest.Config) -> None:
    """Prefect reads the profile and writes the files of a folder of this process's own."""
    home = tempfile.mkdtemp(prefix="prefect-home-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["PREFECT_HOME"] = home
    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")
    _start_processes_quickly()
    _read_authorities_once()
    # What a shell starts with `&` ignores SIGINT, and so does every process that it starts itself.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Engines fill their KV cache with zeros at their start: two seconds for each of the four GiB
    # that they get otherwise.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Collecting makes a million objects that stay. Afterwards, to look for garbage as often as
    # Python does takes 7 % of the tests' processor time.
    gc.disable()
    gc.set_threshold(5_000, 20, 20)
    config.add_cleanup(gc.enable)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Nothing of what is imported now is garbage: do not look at it again and again."""
    gc.freeze()
    gc.enable()


def _start_processes_quickly() -> None:
    """Tests start hundreds of processes, each of which imports the product and Prefect."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(_START), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))


def _read_authorities_once() -> None:
    """Each client of an SDK reads all certificate authorities at its start, though it speaks plain
    HTTP: a third of the processor time of the API's tests, which make thousands of clients.
    """
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
    default.create_ssl_context = functools.cache(default.create_ssl_context)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SQLite with our tables, to be copied: making them takes ten times as long."""
    path = tmp_path_factory.mktemp("tables") / "batchyard.db"
    asyncio.run(upgrade(f"sqlite:///{path}", patience_seconds=10))
    path.chmod(0o600)
    return path


@pytest.fixture
def home_with_tables(empty_database: Path, tmp_path: Path) -> Path:
    """The home of a test, as ``batchyard migrate`` leaves it."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    shutil.copy(empty_database, home)
    return home


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which services were open, with their key, to be copied as well."""
    home = tmp_path_factory.mktemp("empty") / "home"
    asyncio.run(_make_tables(home))
    return home


async def _make_tables(home: Path) -> None:
    async with open_services(read_settings(home=home)):
        pass


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Credentials]:
    """A running Swift with one bucket, empty at first: each test has a part of it to itself."""
    # Not pytest's tmp_path: it is kept for three sessions, and this one is large.
    root = Path(tempfile.mkdtemp(prefix="swift-"))
    try:
        with swift_for_session(root) as server:
            server.credentials.client().create_bucket(Bucket=BUCKET)
            yield server.credentials
    finally:
        shutil.rmtree(root)
