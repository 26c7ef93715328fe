"""``/uploads``: a file in parts, for inputs that are too large for one request."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request, Response

from batchyard.api.answer import answer
from batchyard.api.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.body import body_stream, read_json
from batchyard.api.errors import ApiError, missing
from batchyard.api.files import read_form
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.files.complete import complete_upload
from batchyard.files.parts import MAX_PART_BYTES, add_part, cancel_upload
from batchyard.files.upload import FileUse, checked_lifetime
from batchyard.store import NewUpload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from batchyard.api.auth import Caller
    from batchyard.api.body import JsonObject
    from batchyard.api.multipart import Form

router = APIRouter(prefix="/uploads")

MAX_UPLOAD_BYTES: Final = 8 * 1024**3
_MAX_MIME_TYPE_CHARS = 256


@router.post("")
async def create_upload(request: Request, caller: Authenticated) -> Response:
    asked = await read_json(request)
    asked.only({"filename", "purpose", "bytes", "mime_type", "expires_after"})
    use = FileUse(asked.text("filename"), asked.text("purpose"), _lifetime(asked))
    upload = await caller.services.store.uploads.create(
        NewUpload(
            tenant=caller.tenant,
            filename=use.filename,
            purpose=use.purpose,
            bytes=_size(caller, use, asked.integer("bytes")),
            mime_type=_mime_type(asked.text("mime_type")),
            file_lifetime_seconds=use.kept_seconds(),
        )
    )
    return answer(upload.to_wire())


@router.post("/{upload_id}/parts")
async def create_part(upload_id: str, request: Request, caller: Authenticated) -> Response:
    form = read_form(request, caller, file_field="data", most_bytes=MAX_PART_BYTES)
    with _as_uploads_say(upload_id):
        part = await add_part(caller.services, caller.tenant, upload_id, _data(request, form))
    return answer(part.to_wire())


@router.post("/{upload_id}/complete")
async def complete(upload_id: str, request: Request, caller: Authenticated) -> Response:
    asked = await read_json(request)
    asked.only({"part_ids", "md5"})
    part_ids, md5 = asked.texts("part_ids"), asked.optional_text("md5")
    if md5 is not None and not re.fullmatch(r"[0-9a-fA-F]{32}", md5):
        raise ApiError(400, "'md5' must be 32 hex digits.", param="md5", code="invalid_value")
    with _as_uploads_say(upload_id):
        upload, file = await complete_upload(
            caller.services, caller.tenant, upload_id, part_ids, md5
        )
    return answer(upload.to_wire(file))


@router.post("/{upload_id}/cancel")
async def cancel(upload_id: str, request: Request, caller: Authenticated) -> Response:
    await read_json(request, may_be_empty=True)
    with _as_uploads_say(upload_id):
        upload = await cancel_upload(caller.services, caller.tenant, upload_id)
    return answer(upload.to_wire())


async def _data(request: Request, form: Form) -> AsyncIterator[bytes]:
    """The part's bytes. Raises 400 where the form has none."""
    async for piece in form.content(body_stream(request)):
        yield piece
    if form.file is None:
        raise missing("data")
    if form.file_bytes == 0:
        raise ApiError(400, "The part is empty.", param="data", code="invalid_value")


@contextmanager
def _as_uploads_say(upload_id: str) -> Iterator[None]:
    """An upload that has ended is the client's mistake, not a race: 400, which no SDK retries."""
    try:
        yield
    except RecordNotFound:
        raise ApiError(404, f"No such Upload object: {upload_id}", param="id") from None
    except TransitionConflict as error:
        raise ApiError(400, str(error)) from None


def _lifetime(asked: JsonObject) -> int | None:
    expiry = asked.optional_object("expires_after")
    if expiry is None:
        return None
    expiry.only({"anchor", "seconds"})
    return checked_lifetime(expiry.optional_text("anchor"), expiry.optional_integer("seconds"))


def _size(caller: Caller, use: FileUse, size_bytes: int) -> int:
    most = MAX_UPLOAD_BYTES
    if use.purpose == "batch":
        most = min(most, caller.services.settings.limits.max_bytes)
    if size_bytes < 1:
        code, what = "integer_below_min_value", "at least 1"
    elif size_bytes > most:
        code, what = "integer_above_max_value", f"at most {most}"
    else:
        return size_bytes
    raise ApiError(400, f"'bytes' must be {what}.", param="bytes", code=code)


def _mime_type(text: str) -> str:
    if not text.isprintable() or len(text) > _MAX_MIME_TYPE_CHARS:
        raise ApiError(
            400, "'mime_type' is no media type.", param="mime_type", code="invalid_value"
        )
    return text
