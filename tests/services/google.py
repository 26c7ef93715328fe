"""The XML API of Google Cloud Storage, as obstore speaks it, in front of a real S3 server.

The two APIs differ in how a request is signed, and in headers that we do not use. No emulator that
can be had has Google's multipart uploads: fake-gcs-server 1.54 answers them with "invalid
uploadType", and gcp-storage-emulator has only the JSON API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import web
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from yarl import URL

from batchyard.storage.cloud_bucket import GoogleCredentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchyard.storage.bucket import S3Credentials

_ASKED = ("range", "if-match", "content-type")
_ANSWERED = ("content-length", "content-range", "content-type", "etag", "last-modified")


@contextlib.contextmanager
def google_for_session(
    s3: S3Credentials, refuses: Callable[[str], bool] = lambda _: False
) -> Iterator[GoogleCredentials]:
    """A server with the buckets of the S3 server. It asks nobody for a token.

    ``refuses``: whether it answers 503 to a request, such as ``PUT /bucket/key?partNumber=1``.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def forward(request: web.Request) -> web.StreamResponse:
        if refuses(f"{request.method} {request.raw_path}"):
            return web.Response(status=503)
        return await _forward(request, s3)

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
    try:
        yield GoogleCredentials(
            service_account_key=json.dumps(account | {"private_key_id": ""}), endpoint_url=url
        )
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _forward(request: web.Request, s3: S3Credentials) -> web.StreamResponse:
    path = quote(unquote(request.raw_path.partition("?")[0]), safe="/-_.~")
    url = f"{s3.endpoint_url}{path}?{request.raw_path.partition('?')[2]}".rstrip("?")
    headers = {name: request.headers[name] for name in _ASKED if name in request.headers}
    signed = AWSRequest(request.method, url, headers, await request.read())
    who = Credentials(s3.access_key_id, s3.secret_access_key)
    S3SigV4Auth(who, "s3", s3.region).add_auth(signed)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(
            request.method,
            URL(url, encoded=True),
            data=signed.data,
            headers=dict(signed.headers.items()),
        ) as answer,
    ):
        found = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=found)
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        return response
