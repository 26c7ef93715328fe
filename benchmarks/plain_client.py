"""A plain HTTP client of a server with the OpenAI API: one POST for each request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp

from benchmarks.comparators import URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparators import Send

_TRIES: Final = 5
_PAUSE_SECONDS: Final = 0.05


def posting(session: aiohttp.ClientSession) -> Send:
    """A request body in, the answer's body out."""
    headers = {"Content-Type": "application/json"}

    async def post(body: bytes) -> bytes:
        async with session.post(URL, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def send(body: bytes) -> bytes:
        for _ in range(_TRIES):
            try:
                return await post(body)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                # The server ended the connection as idle while we wrote to it.
                await asyncio.sleep(_PAUSE_SECONDS)
        return await post(body)

    return send


def read_bodies(file: str) -> tuple[list[str], list[bytes]]:
    """The ``custom_id`` and the body of each line."""
    lines = list(map(json.loads, Path(file).read_text().splitlines()))
    return [line["custom_id"] for line in lines], [
        json.dumps(line["body"]).encode() for line in lines
    ]


def write_answers(output: str, names: Sequence[str], answers: Sequence[bytes]) -> None:
    with Path(output).open("w") as results:
        for name, answer in zip(names, answers, strict=True):
            response = {"status_code": 200, "body": json.loads(answer)}
            results.write(json.dumps({"custom_id": name, "response": response}) + "\n")


async def empty_cache(session: aiohttp.ClientSession) -> None:
    """Empty the prefix cache of a vLLM in its development mode."""
    # It cannot while the last blocks of the job before are still held.
    while True:
        async with session.post("/reset_prefix_cache") as response:
            assert response.status == 200, await response.text()
            if (await response.json())["success"]:
                return
        await asyncio.sleep(0.1)
