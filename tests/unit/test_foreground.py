"""A Prefect server that `batchyard run` cannot use: what the user is told to do about it."""

from __future__ import annotations

import pytest
from aiohttp import web
from prefect.settings import PREFECT_API_URL, temporary_settings

from batchyard.errors import DispatchFailed
from commands.foreground import _check_prefect


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, "{}"), "refuses the login .HTTP 401.: set PREFECT_API_AUTH_STRING"),
        ((403, "{}"), "refuses the login .HTTP 403.: set PREFECT_API_AUTH_STRING"),
        ((200, '"99.0.0"'), "cannot be used: Found incompatible versions: .* server: 99.0.0"),
        ((500, "{}"), "does not answer .RuntimeError.: check that the server runs"),
    ],
)
async def test_a_server_that_refuses_is_not_called_one_that_does_not_run(
    answer: tuple[int, str], said: str
) -> None:
    async def reply(_: web.Request) -> web.Response:
        status, text = answer
        return web.Response(status=status, text=text, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), pytest.raises(DispatchFailed, match=said):
            await _check_prefect(url)
    finally:
        await runner.cleanup()
