"""The processes of an installation without Prefect: control, runner and API, each to be killed.

They are forked by a nursery; see :mod:`tests.faults.actor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from batchyard.cli.operate.serve import listening
from batchyard.lines.offer import Offer
from batchyard.server import create_app
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.faults.actor import control, run_as, runner, serve_nursery
from tests.hurry import hurried
from tests.mixtures.engine import WordedEngine
from tests.mixtures.lines import ADAPTER, MODEL

if TYPE_CHECKING:
    from collections.abc import Collection

_OFFER = Offer.of({MODEL: [ADAPTER]})


async def _offer(_: Collection[str] = ()) -> Offer:
    return _OFFER


async def _serve(role: str, parts: dict[str, Any]) -> None:
    async def engine_for(model: str) -> WordedEngine:
        return WordedEngine(model, log_path=Path(parts["engine"]["log_path"]))

    settings = read_settings(**parts["settings"])
    with hurried(**parts["hurry"]):
        if role == "api":
            config = uvicorn.Config(create_app(settings), log_config=None, access_log=False)
            with listening("127.0.0.1", parts["port"]) as listener:
                await uvicorn.Server(config).serve(sockets=[listener])
            return
        async with open_services(settings, engine_for=engine_for, find_offer=_offer) as services:
            if role == "control":
                await control(services)
            else:
                await runner(services, parts["model"])


def _act(role: str, parts: dict[str, Any]) -> int:
    return run_as(role, _serve(role, parts))


if __name__ == "__main__":
    serve_nursery(_act)
