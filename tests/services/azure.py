"""Azurite, Microsoft's emulator of Azure's blob storage, started on loopback for a test session."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import subprocess
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.storage.cloud_bucket import AzureCredentials
from tests.patience import PATIENCE
from tests.services.node import npm_folder
from tests.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTAINER = "batches"
"""The one that tests use."""

_ACCOUNT = "devstoreaccount1"
# Every Azurite has this one, and its documentation says so.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_LISTS = Path(__file__).parent / "azurite"
_START_SECONDS = 60 * PATIENCE
_VERSION = "2021-08-06"


@contextlib.contextmanager
def azurite_for_session() -> Iterator[AzureCredentials]:
    """A server with an empty container. Skips where npm's packages cannot be had."""
    program = npm_folder(_LISTS) / "node_modules" / ".bin" / "azurite-blob"
    (port,) = free_ports(1)
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    command = [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}/{_ACCOUNT}"
            _make_container(url)
            yield AzureCredentials(account_name=_ACCOUNT, account_key=_KEY, endpoint_url=url)
        finally:
            process.kill()


def _make_container(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(_request(url), timeout=10):  # noqa: S310 - loopback
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _request(url: str) -> urllib.request.Request:
    """Signed with the account's key: https://learn.microsoft.com/rest/api/storageservices."""
    now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": now, "x-ms-version": _VERSION}
    named = "\n".join(f"{name}:{value}" for name, value in headers.items())
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"{named}\n{resource}"
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    return urllib.request.Request(  # noqa: S310 - loopback
        f"{url}/{CONTAINER}?restype=container", method="PUT", headers=headers
    )
