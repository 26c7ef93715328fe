"""One fleet for the tests of these modules; each test finds it whole."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fleet.fleet import Fleet, User, running_fleet, user_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.storage.bucket import S3Credentials

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="package")
def running(s3: S3Credentials) -> Iterator[Fleet]:
    root = Path(tempfile.mkdtemp(prefix="fleet-", dir="/tmp"))
    try:
        with running_fleet(root, s3) as fleet:
            yield fleet
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def fleet(running: Fleet, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Whole, with its settings for commands and services of the test's own."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.start_missing()
    running.receiver.requests.clear()
    return running


@pytest.fixture
async def user(fleet: Fleet, tmp_path: Path) -> AsyncIterator[User]:
    async with user_of(fleet, tmp_path, f"model-{next(_NUMBERS)}") as opened:
        yield opened
