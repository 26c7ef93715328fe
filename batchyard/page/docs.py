"""``/docs``: the OpenAPI document in Swagger UI, which comes from here and from no other host.

``swagger_ui`` has the files of the npm package swagger-ui-dist as they are, with their licence;
``start.js`` is ours. FastAPI's own page would load them from a CDN and has an inline script.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from batchyard.page.html import HEADERS, render

VERSION: Final = "5.35.0"
VENDORED: Final = {
    "swagger-ui-bundle.js": "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    "swagger-ui.css": "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
    "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    "NOTICE": "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
    "swagger-ui-bundle.js.LICENSE.txt": (
        "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb"
    ),
}
"""SHA-256 of each file, as in the package of this version."""

FOLDER: Final = Path(str(files("batchyard.page") / "swagger_ui"))

router = APIRouter(include_in_schema=False)

_SERVED: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
# Its icons are data: URLs in its style sheet.
_POLICY: Final = f"{HEADERS['content-security-policy']}; img-src 'self' data:"


@router.get("/docs")
async def docs() -> Response:
    """The page."""
    response = render("docs.html")
    response.headers["content-security-policy"] = _POLICY
    return response


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    """A file of Swagger UI, which a browser may keep for a day."""
    if name not in _SERVED:
        raise HTTPException(404)
    headers = {"cache-control": "public, max-age=86400", "x-content-type-options": "nosniff"}
    return FileResponse(FOLDER / name, media_type=_SERVED[name], headers=headers)
