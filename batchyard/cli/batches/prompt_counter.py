"""What counts a model's prompts for ``batchyard estimate``: by its block, or by what is given."""

from __future__ import annotations

import asyncio
import os
import shlex
from typing import TYPE_CHECKING, Final

from batchyard.dispatch import PrefectApi, block_name
from batchyard.engine.prompt_counting.counter import counter_program
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.errors import BatchyardError
from batchyard.services.machine.engine_python import engine_python
from batchyard.steps.prepare.deep_validation import NO_COUNTER, NoCounter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.engine.prompt_counting.counter import CounterProgram
    from batchyard.settings import Settings

_PATIENCE_SECONDS: Final = 10.0
_HINT: Final = "name the folder of its weights with --weights"


async def counter_of(
    settings: Settings, model: str | None, *, weights: str | None, options: str
) -> CounterProgram | NoCounter:
    """The counter of these ``weights`` and ``options``, or those of the model's block.

    It raises nothing: an estimate has other figures, too.
    """
    environment: Mapping[str, str] = {}
    try:
        if weights is None:
            if model is None:
                return NoCounter("no line names a model")
            if not os.environ.get("PREFECT_API_URL"):
                return NoCounter(f"PREFECT_API_URL is not set: {_HINT}")
            async with asyncio.timeout(_PATIENCE_SECONDS), PrefectApi.from_environment() as api:
                found = {each.name: each for each in await api.offered_models()}
            if model not in found:
                return NoCounter(f"there is no block {block_name(model)}: {_HINT}")
            block = found[model]
            if not block.is_ours:
                return NoCounter(NO_COUNTER)
            weights, options, environment = block.weights, block.options, block.environment
        python = engine_python(settings)
        return counter_program(python, weights, EngineOptions(shlex.split(options)), environment)
    except TimeoutError:
        return NoCounter(f"Prefect is too slow: {_HINT}")
    except (BatchyardError, ValueError) as error:
        return NoCounter(str(error).rstrip("."))
