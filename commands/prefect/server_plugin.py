"""Additions to Prefect's own server: a plugin, and an app for the servers that we start.

Where Prefect's database is SQLite, the plugin gives it the cursors of
``batchyard.database.sqlite_cursors``, which says what happens without them. It also lets an idle
server do less. Prefect loads the plugin by its entry point, ``prefect.plugins`` in pyproject.toml,
with ``PREFECT_PLUGINS_ENABLED=true`` in the server's environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from docket import Worker
from prefect.plugins import register_hook
from sqlalchemy.engine import Engine
from starlette.middleware.trustedhost import TrustedHostMiddleware

from batchyard.database.sqlite_cursors import use_own_cursors
from commands.prefect.closed import HOSTS
from commands.prefect.lean import look_less_often

if TYPE_CHECKING:
    from prefect.plugins import HookContext


@register_hook
def setup_environment(*, ctx: HookContext) -> None:  # noqa: ARG001 - its name is the hook's
    """Called once, before the server makes its engine and its worker."""
    _add_to_server()


def _add_to_server() -> None:
    use_own_cursors(Engine)
    look_less_often(Worker)


def create_app() -> TrustedHostMiddleware:
    """Prefect's API with the same, for uvicorn: in its event loop Prefect cannot load plugins.

    It answers to the names of this machine only: Prefect has no setting for that, and a web page
    could give its own name our address. Around the app, because the server's services call the app
    itself, under a name of their own.
    """
    from prefect.server.api.server import create_app as of_prefect  # noqa: PLC0415 - a second

    _add_to_server()
    return TrustedHostMiddleware(of_prefect(), allowed_hosts=HOSTS, www_redirect=False)
