"""The API under load: a 200 MB upload against a plain streamed write, and a hundred pollers.

`batchyard serve` runs in a home of its own on SQLite and a local folder. The plain write reads
the same file in parts, writes them to another one on the same disk and calls `fsync`, as our
storage does. The upload is curl's, over loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peak_memory import forget_peak, peak_mebibytes
from tests.services.prefect import free_port

ROOT = Path(__file__).parents[1]
UPLOAD_BYTES = 200 * 1024**2
PART_BYTES = 1024**2
ROUNDS = 3
POLLERS = 100
POLL_SECONDS = 20.0


@dataclass(frozen=True)
class ApiLoad:
    """Seconds are medians. ``*_growth``: peak resident memory of the server, MiB, over before."""

    upload_seconds: float
    write_seconds: float
    upload_growth: float
    polls_per_second: float
    poll_growth: float

    @property
    def ratio(self) -> float:
        """The upload's throughput over that of the plain write."""
        return self.write_seconds / self.upload_seconds


def measure() -> ApiLoad:
    with tempfile.TemporaryDirectory() as folder:
        home, port = Path(folder), free_port()
        source = _write_source(home / "input.jsonl")
        environment = os.environ | {"BATCHYARD_HOME": str(home / "home")}
        server = subprocess.Popen(
            [Path(sys.executable).parent / "batchyard", "serve", "--port", str(port)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait_for(url)
            key = (home / "home" / "api.key").read_text().strip()
            _upload(url, key, source)  # what the first one loads is loaded
            return _measure(url, key, source, home, server.pid)
        finally:
            server.terminate()
            server.wait(30)


def _measure(url: str, key: str, source: Path, home: Path, pid: int) -> ApiLoad:
    before = forget_peak(pid)
    uploads = sorted(_timed(lambda: _upload(url, key, source)) for _ in range(ROUNDS))
    upload_growth = peak_mebibytes(pid) - before
    writes = sorted(_timed(lambda: _plain_write(source, home / "copy")) for _ in range(ROUNDS))
    file_id = _upload(url, key, source)["id"]
    batch_ids = [_create(url, key, file_id)["id"] for _ in range(20)]
    before = forget_peak(pid)
    polls = asyncio.run(_poll(url, key, batch_ids))
    return ApiLoad(
        upload_seconds=uploads[ROUNDS // 2],
        write_seconds=writes[ROUNDS // 2],
        upload_growth=upload_growth,
        polls_per_second=polls / POLL_SECONDS,
        poll_growth=peak_mebibytes(pid) - before,
    )


async def _poll(url: str, key: str, batch_ids: list[str]) -> int:
    """A hundred clients that retrieve and list in turn; how many answers, all of them 200."""
    answers = 0
    until = time.monotonic() + POLL_SECONDS

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal answers
        while time.monotonic() < until:
            path = f"/batches/{batch_ids[number % len(batch_ids)]}" if answers % 2 else "/batches"
            async with session.get(url + path) as response:
                assert response.status == 200, await response.text()
                await response.read()
            answers += 1

    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=POLLERS)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        await asyncio.gather(*(client(session, number) for number in range(POLLERS)))
    return answers


def _upload(url: str, key: str, source: Path) -> dict[str, Any]:
    form = ["-F", "purpose=batch", "-F", f"file=@{source}"]
    done = subprocess.run(
        ["curl", "-sS", f"{url}/files", "-H", f"Authorization: Bearer {key}", *form],
        capture_output=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert "error" not in answer, answer
    return answer


def _create(url: str, key: str, file_id: str) -> dict[str, Any]:
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}/batches",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - our own server
        answer: dict[str, Any] = json.load(response)
        return answer


def _plain_write(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        while part := reader.read(PART_BYTES):
            writer.write(part)
        writer.flush()
        os.fsync(writer.fileno())


def _timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _write_source(path: Path) -> Path:
    body = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": "x" * 4000}],
        "max_tokens": 8,
    }
    with path.open("w") as file:
        number = 0
        while file.tell() < UPLOAD_BYTES - 8192:
            line = {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(line) + "\n")
            number += 1
    return path


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url + "/models", timeout=2)  # noqa: S310 - our own server
        except urllib.error.HTTPError:
            return  # it wants a key, so it is there
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the API did not start")


def table(found: ApiLoad) -> str:
    upload = f"**{found.ratio:.2f}×** | +{found.upload_growth:.0f} MiB"
    polls = f"{found.polls_per_second:,.0f} a second | +{found.poll_growth:.0f} MiB"
    return "\n".join(
        [
            "| the API, one process | | peak memory of the server |",
            "|---|---|---|",
            f"| upload of 200 MB, throughput over a plain streamed write | {upload} |",
            f"| {POLLERS} clients that retrieve and list | {polls} |",
        ]
    )


def section() -> str:
    """Measure, and return what the page is to say."""
    return table(measure())


if __name__ == "__main__":
    print(table(measure()))
