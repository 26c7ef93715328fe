"""``/uploads``: a file in parts, for inputs that are too large for one request."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from batchyard.api.files.files import BINARY, read_form
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.body import body_stream
from batchyard.api.http.errors import missing
from batchyard.api.http.json_body import (
    AnyKeys,
    ExpiresAfter,
    Integer,
    JsonBody,
    RequestBody,
    Text,
    Texts,
    described,
)
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.route import Route, form
from batchyard.errors import RecordNotFound, TransitionConflict
from batchyard.files import complete, parts
from batchyard.files.upload import PURPOSES, FileUse
from batchyard.services.quotas import default_quota
from batchyard.store import NewUpload
from batchyard.wire import Upload, UploadPart  # noqa: TC001 — FastAPI reads it at run time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from batchyard.api.http.auth import Caller
    from batchyard.api.http.multipart import Form

router = APIRouter(prefix="/uploads", route_class=Route)

MAX_UPLOAD_BYTES: Final = 8 * 1024**3
_MAX_MIME_TYPE_CHARS = 256
_MD5 = "[0-9a-fA-F]{32}"


def _checked_mime_type(text: str) -> str:
    if not text.isprintable() or len(text) > _MAX_MIME_TYPE_CHARS:
        raise PydanticCustomError("invalid_value", "'mime_type' is not a media type.")
    return text


def _checked_md5(text: str) -> str:
    if not re.fullmatch(_MD5, text):
        raise PydanticCustomError("invalid_value", "'md5' must be 32 hex digits.")
    return text


class CreateUpload(RequestBody):
    """The file that is to come in parts."""

    filename: Text
    purpose: Annotated[Text, described(enum=PURPOSES)]
    expires_after: ExpiresAfter | None = None
    bytes: Annotated[Integer, Field(ge=1)]
    mime_type: Annotated[
        Text, AfterValidator(_checked_mime_type), described(maxLength=_MAX_MIME_TYPE_CHARS)
    ]


class CompleteUpload(RequestBody):
    """The parts in the file's order."""

    part_ids: Texts
    md5: Annotated[Text, AfterValidator(_checked_md5), described(pattern=f"^{_MD5}$")] | None = None


@router.post("", summary="Begin a file in parts")
async def create_upload(
    caller: Authenticated, asked: Annotated[CreateUpload, Depends(JsonBody(CreateUpload))]
) -> JsonResponse[Upload]:
    """Announce a file that is sent in parts, with its name, size and purpose."""
    lifetime = asked.expires_after.lifetime_seconds() if asked.expires_after else None
    use = FileUse(asked.filename, asked.purpose, lifetime)
    upload = await caller.services.store.uploads.create(
        NewUpload(
            tenant=caller.tenant,
            filename=use.filename,
            purpose=use.purpose,
            bytes=_size(caller, use, asked.bytes),
            mime_type=asked.mime_type,
            file_lifetime_seconds=use.kept_seconds(),
        ),
        quota=default_quota(caller.services),
    )
    return JsonResponse(upload.to_wire())


@router.post(
    "/{upload_id}/parts",
    summary="Send a part",
    openapi_extra=form({"data": BINARY}, required=["data"]),
)
async def add_upload_part(
    upload_id: str, request: Request, caller: Authenticated
) -> JsonResponse[UploadPart]:
    """Send one part as multipart/form-data. Parts may be sent at the same time and in any order."""
    sent = read_form(request, caller, file_field="data", most_bytes=parts.MAX_PART_BYTES)
    with _as_uploads_say(upload_id):
        part = await parts.add_part(caller.services, caller.tenant, upload_id, _data(request, sent))
    return JsonResponse(part.to_wire())


@router.post("/{upload_id}/complete", summary="Join the parts")
async def complete_upload(
    upload_id: str,
    caller: Authenticated,
    asked: Annotated[CompleteUpload, Depends(JsonBody(CompleteUpload))],
) -> JsonResponse[Upload]:
    """Make a file from the parts, in the order in which their ids are listed.

    The same request again has the same answer.
    """
    with _as_uploads_say(upload_id):
        upload, file = await complete.complete_upload(
            caller.services, caller.tenant, upload_id, asked.part_ids, asked.md5
        )
    return JsonResponse(upload.to_wire(file))


@router.post("/{upload_id}/cancel", summary="Drop the parts")
async def cancel_upload(
    upload_id: str,
    caller: Authenticated,
    _: Annotated[AnyKeys, Depends(JsonBody(AnyKeys, may_be_empty=True))],
) -> JsonResponse[Upload]:
    """Cancel the upload. Its parts are deleted."""
    with _as_uploads_say(upload_id):
        upload = await parts.cancel_upload(caller.services, caller.tenant, upload_id)
    return JsonResponse(upload.to_wire())


async def _data(request: Request, form: Form) -> AsyncGenerator[bytes]:
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


def _size(caller: Caller, use: FileUse, size_bytes: int) -> int:
    most = MAX_UPLOAD_BYTES
    if use.purpose == "batch":
        most = min(most, caller.services.settings.limits.max_bytes)
    if size_bytes > most:
        raise ApiError(
            400,
            f"'bytes' must be at most {most}.",
            param="bytes",
            code="integer_above_max_value",
        )
    return size_bytes
