"""Short prompts are made into tokens where they are, and not in another thread of vLLM's server.

vLLM hands a chat's template and its tokens to a thread, each by itself, so that a long prompt holds
up nobody. For a short one the two ways there and back cost more than the work. Loaded twice, as
``line_stream`` is: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import contextvars
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_BYTES: Final = 2048
"""Of a request's body: some hundred tokens, in a tenth of a millisecond. A server with cores to
spare makes longer ones beside its other work."""
_TEMPLATE: Final = b"chat_template"
"""What a template gets from its request may keep it busy, for which vLLM's threads have a limit."""

_is_short: contextvars.ContextVar[bool] = contextvars.ContextVar("is_short", default=False)


def note(body: bytes) -> None:
    """Of the request that the current task runs from now on."""
    _is_short.set(len(body) <= SHORT_BYTES and _TEMPLATE not in body)


def read_here(app: Any) -> None:
    """Let vLLM's renderer run what a noted task asks of its threads at once, if it is short.

    A server that is made otherwise stays as it is.
    """
    with contextlib.suppress(AttributeError):
        executor = app.state.engine_client.renderer._executor  # noqa: SLF001 - its only name
        executor.submit = _at_once_if_short(executor.submit)


def _at_once_if_short(in_thread: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def submit(function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        if not _is_short.get():
            return in_thread(function, *args, **named)
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **named))
        except BaseException as error:  # noqa: BLE001 - as a thread does: whoever waits raises it
            done.set_exception(error)
        return done

    return submit
