"""Which fields of a file vLLM ignores, for ``batchyard estimate``: by this machine's environment.

No engine runs then, so its request models are asked. This takes about five seconds, so it is only
done for a file with fields beyond those that its endpoints cannot do without.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from batchyard.engine.prompt_counting.counter import SCRIPT, counter_program
from batchyard.engine.routes import post_routes
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.errors import SettingsError
from batchyard.lines.body_fields import ignored_fields
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.processes.child_program import ChildProgram, ProgramEnded
from batchyard.services.machine.engine_python import engine_python

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.settings import Settings

_PATIENCE_SECONDS: Final = 120.0
_USUAL: Final = frozenset({"model", "max_tokens", "temperature"})


async def ignored_by_vllm(
    settings: Settings, fields: Mapping[str, Mapping[str, int]]
) -> dict[str, int]:
    """The lines of each field that vLLM ignores; nothing where this machine has no vLLM.

    ``fields``: the lines that have each, by endpoint. It raises nothing.
    """
    if not any(found.keys() - _USUAL - _needed(url) for url, found in fields.items()):
        return {}
    try:
        python = engine_python(settings)
        program = counter_program(python, "", EngineOptions(()), {})
        process = await ChildProgram.start(
            SCRIPT.with_name("request_models.py"),
            environment=program.environment,
            python=python,
            options=(),
        )
    except (SettingsError, OSError):
        return {}
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            routes = post_routes(await process.ask(b""))
    except (TimeoutError, ProgramEnded):
        return {}
    finally:
        await process.end()
    return {} if routes is None else ignored_fields(fields, routes)


def _needed(url: str) -> frozenset[str]:
    return frozenset(field for choice in ENDPOINTS[url].required for field in choice)
