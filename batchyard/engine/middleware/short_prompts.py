"""Short prompts are rendered and tokenized in the event loop, and not in a thread of vLLM's server.

vLLM renders a chat's template in a thread, and tokenizes the text in a thread again, so that a long
prompt does not delay other requests. A short prompt takes less time than these two changes of
thread. Loaded twice, as ``line_stream`` is: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import contextvars
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SHORT_BYTES: Final = 2048
"""Of a request's body: some hundred tokens, in a tenth of a millisecond. For longer ones a thread,
which may have a core of its own, is worth its cost."""
_TEMPLATE: Final = b"chat_template"
"""A request's arguments may make a template run for long; vLLM limits the time of its threads."""

_is_short: contextvars.ContextVar[bool] = contextvars.ContextVar("is_short", default=False)


def note_body(body: bytes) -> None:
    """Remember for the current task whether its request is short."""
    _is_short.set(len(body) <= SHORT_BYTES and _TEMPLATE not in body)


def skip_threads(app: Any) -> None:
    """Let the renderer of vLLM's application do without threads where a request is short.

    An application without such a renderer is not changed.
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
        except BaseException as error:  # noqa: BLE001 - as in a thread: it is raised where it is awaited
            done.set_exception(error)
        return done

    return submit
