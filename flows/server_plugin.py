"""A plugin of Prefect's own server, for where its database is SQLite: it closes failed cursors.

Prefect loads it by its entry point, ``prefect.plugins`` in pyproject.toml, with
``PREFECT_PLUGINS_ENABLED=true`` in the server's environment. ``batchyard.failed_cursors`` says
what happens without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.plugins import register_hook
from sqlalchemy.engine import Engine

from batchyard.failed_cursors import close_failed_cursors

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prefect.plugins import HookContext


@register_hook
def setup_environment(*, ctx: HookContext) -> None:  # noqa: ARG001 - its name is the hook's
    """Called once, before the server makes its engine."""
    close_failed_cursors(Engine)


def create_app() -> FastAPI:
    """Prefect's API with the same, for uvicorn: in its event loop Prefect cannot load plugins."""
    from prefect.server.api.server import create_app as of_prefect  # noqa: PLC0415 - a second

    close_failed_cursors(Engine)
    return of_prefect()
