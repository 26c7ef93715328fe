"""HTML answers: templates, and the headers that all of them have."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from batchyard.page.static_files import url_of

HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def render(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """The template with ``values``, all of which are text and never markup."""
    text = _environment().get_template(template).render(**values)
    return HTMLResponse(text, status_code=status, headers=HEADERS)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("batchyard.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["url_of"] = url_of
    return environment
