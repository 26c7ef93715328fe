"""Routes whose answers are pages, errors too, and what every page has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.errors import SERVER_FAILED, as_api_error, log_failure
from batchyard.api.http.session import csrf_token
from batchyard.errors import BatchyardError
from batchyard.page.form_key import new_form_key
from batchyard.page.html import render

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Request, Response

    from batchyard.api.http.auth import Caller

_TITLES = {
    403: "Not allowed",
    404: "Not found",
    409: "Not possible now",
    429: "Too many at once",
    503: "Not available now",
}


class PageRoute(APIRoute):
    """Answers an error with a page. The application answers a missing session."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, around which errors become pages."""
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                return _refusal(request, error)
            except BatchyardError as error:
                answer = as_api_error(error)
                if answer.status == SERVER_FAILED:
                    raise  # a defect: with its traceback in the log
                log_failure(request, error, answer)
                return _refusal(request, answer)

        return handle_page


def shell(request: Request, caller: Caller | None, template: str, **values: Any) -> Response:
    """A page, or a part of one, with what all of them need."""
    status = values.pop("status", 200)
    return render(
        template,
        status=status,
        caller=caller,
        csrf="" if caller is None else csrf_token(request),
        form_key=new_form_key(),
        **values,
    )


def _refusal(request: Request, error: ApiError) -> Response:
    title = _TITLES.get(error.status, "This did not work")
    response = shell(
        request, None, "message.html", title=title, message=str(error), status=error.status
    )
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
