"""``/files``: upload, list, look at, download, delete."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse
from pydantic import WithJsonSchema

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import Authenticated  # noqa: TC001 — FastAPI reads it at run time
from batchyard.api.http.begun_stream import begun
from batchyard.api.http.body import body_stream
from batchyard.api.http.errors import missing
from batchyard.api.http.json_body import EXPIRY
from batchyard.api.http.json_response import JsonResponse
from batchyard.api.http.multipart import Form, too_large
from batchyard.api.http.pages import (
    After,
    ListPage,
    known_cursor,
    limit_schema,
    read_paging,
    to_list_page,
)
from batchyard.api.http.route import HEADERS, Route, form, may_refuse
from batchyard.errors import RecordNotFound, StorageError
from batchyard.files import delete
from batchyard.files.upload import (
    PURPOSES,
    FileUse,
    checked_lifetime,
    limit_bytes,
    may_be_input,
    upload_file,
)
from batchyard.services.quotas import default_quota
from batchyard.wire import File, FileDeleted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.api.http.auth import Caller
    from batchyard.store import FileRecord

router = APIRouter(prefix="/files", route_class=Route)

BINARY: Final = {"type": "string", "format": "binary"}

_MOST_FILES = 10_000
_DOWNLOADABLE = {"batch", "batch_output"}
_UNNAMED = "upload"
"""What openai-python calls bytes without a name."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_FORM_BYTES = 64 * 1024
"""What a form may have around its file."""

_EXPIRY_FIELDS = {
    name: (f"expires_after[{name}]", f"expires_after.{name}") for name in ("anchor", "seconds")
}
_FIELDS = {"purpose", *(key for keys in _EXPIRY_FIELDS.values() for key in keys)}

_FORM: Final[dict[str, Any]] = {
    "file": BINARY,
    "purpose": {"type": "string", "enum": PURPOSES},
    **{f"expires_after[{name}]": schema for name, schema in EXPIRY.items()},
}
# Never JSON, which it may well hold: clients would parse it.
_BYTES = {"headers": HEADERS, "content": {"application/octet-stream": {"schema": BINARY}}}


@router.post("", summary="Upload a file", openapi_extra=form(_FORM, required=["file", "purpose"]))
async def create_file(request: Request, caller: Authenticated) -> JsonResponse[File]:
    """Upload a file as multipart/form-data."""
    sent = read_form(request, caller, file_field="file")
    # Before any of it is sent; what is not announced is seen when all of it is there.
    announced = max(0, _announced_bytes(request) - _FORM_BYTES)
    await caller.services.store.tenants.check_room(
        caller.tenant, default_quota(caller.services), stored_bytes=announced
    )
    file = await upload_file(
        caller.services,
        caller.tenant,
        sent.content(body_stream(request)),
        lambda: _use(caller, sent),
        lambda: _may_be_input(sent),
    )
    return JsonResponse(file.to_wire())


@router.get("", summary="List files")
async def list_files(
    caller: Authenticated,
    purpose: str | None = None,
    limit: Annotated[str | None, limit_schema(_MOST_FILES, _MOST_FILES)] = None,
    after: After = None,
    order: Annotated[
        str | None,
        WithJsonSchema({"type": "string", "enum": ["asc", "desc"]}),
    ] = None,
) -> JsonResponse[ListPage[File]]:
    """One page of your files. To get the next page, pass the last id as `after`."""
    asked = {"limit": limit, "after": after, "order": order}
    paging = read_paging(asked, most=_MOST_FILES, default=_MOST_FILES)
    with known_cursor(paging):
        page = await caller.services.store.files.page(
            caller.tenant,
            purpose=purpose or None,
            order=paging.order,
            limit=paging.limit,
            after=paging.after,
        )
    return JsonResponse(to_list_page([file.to_wire() for file in page], has_more=page.has_more))


@router.get("/{file_id}", summary="Look at a file")
async def retrieve_file(file_id: str, caller: Authenticated) -> JsonResponse[File]:
    """The file's name, size, purpose and times, without its content."""
    return JsonResponse((await _file(caller, file_id, caller.tenant)).to_wire())


@router.delete("/{file_id}", summary="Delete a file")
async def delete_file(file_id: str, caller: Authenticated) -> JsonResponse[FileDeleted]:
    """Delete the file. A batch that runs on it continues."""
    try:
        await delete.delete_file(caller.services, caller.tenant, file_id)
    except RecordNotFound:
        raise _no_such_file(file_id) from None
    return JsonResponse(FileDeleted(id=file_id))


@router.get(
    "/{file_id}/content",
    summary="Download a file",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The whole file.", **_BYTES},
        206: {"description": "The range.", **_BYTES},
        **may_refuse(416),
    },
)
async def download_file(
    file_id: str,
    caller: Authenticated,
    wanted_range: Annotated[
        str | None,
        Header(
            alias="Range",
            description="One range of bytes, such as `bytes=0-1023`; anything else is ignored.",
        ),
    ] = None,
) -> StreamingResponse:
    """The content of an input, output or error file, or one range of its bytes."""
    file = await _file(caller, file_id, caller.tenant)
    if file.purpose not in _DOWNLOADABLE:
        raise ApiError(400, f"Not allowed to download files of purpose: {file.purpose}")
    return await file_response(caller, file, wanted_range)


async def file_response(
    caller: Caller, file: FileRecord, wanted_range: str | None = None
) -> StreamingResponse:
    """The file, to be saved under its name, or one range of it. Raises 416."""
    wanted = _range(wanted_range, file.size_bytes)
    start, stop = wanted or (0, file.size_bytes)
    headers = {
        "content-length": str(stop - start),
        "content-disposition": _disposition(file.filename),
        "accept-ranges": "bytes",
        "x-content-type-options": "nosniff",
    }
    if wanted is not None:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{file.size_bytes}"
    return StreamingResponse(
        await _opened(caller, file, start, stop),
        status_code=200 if wanted is None else 206,
        headers=headers,
        media_type="application/octet-stream",
    )


def read_form(
    request: Request, caller: Caller, *, file_field: str, most_bytes: int | None = None
) -> Form:
    """The request's form, not yet read. ``most_bytes`` None: the limit is that of the purpose.

    Raises 413 for a body that announces more than fits, before any of it is read.
    """

    def limit(fields: dict[str, str]) -> int:
        if most_bytes is not None:
            return most_bytes
        return limit_bytes(caller.services, fields.get("purpose"))

    if _announced_bytes(request) > limit({}) + _FORM_BYTES:
        raise too_large(file_field, limit({}))
    return Form(request.headers.get("content-type", ""), file_field=file_field, limit_bytes=limit)


def _announced_bytes(request: Request) -> int:
    """How long the body is to be; 0: it does not say."""
    announced = request.headers.get("content-length", "0")
    return int(announced) if announced.isdecimal() else 0


def _may_be_input(form: Form) -> bool:
    """As far as the form has come: its purpose may be behind the file, as openai-node sends it."""
    name = (form.file.filename if form.file else None) or _UNNAMED
    return form.fields.get("purpose", "batch") == "batch" and may_be_input(name)


def _use(caller: Caller, form: Form) -> FileUse:
    """What the form's fields say. Raises 400, and 413 for more than the purpose allows."""
    for key in form.fields:
        if key not in _FIELDS:
            raise ApiError(
                400,
                f"Unknown parameter: '{key[:64]}'.",
                param=key[:64],
                code="unknown_parameter",
            )
    if form.file is None:
        raise missing("file")
    if not form.fields.get("purpose"):
        raise missing("purpose")
    purpose = form.fields["purpose"]
    use = FileUse(form.file.filename or _UNNAMED, purpose, _lifetime(form.fields))
    # A file that came before its purpose was only held to the largest limit of all.
    limit = limit_bytes(caller.services, purpose)
    if form.file_bytes > limit:
        raise too_large("file", limit)
    return use


def _lifetime(fields: dict[str, str]) -> int | None:
    """``expires_after`` as the SDKs' forms spell it, with brackets, and with dots."""
    anchor, seconds = (
        next((fields[key] for key in keys if key in fields), None)
        for keys in _EXPIRY_FIELDS.values()
    )
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and re.fullmatch(r"-?[0-9]{1,18}", seconds)
    return checked_lifetime(anchor, int(seconds) if seconds and is_number else seconds)


async def _file(caller: Caller, file_id: str, tenant: str) -> FileRecord:
    try:
        return await caller.services.store.files.get(file_id, tenant=tenant)
    except RecordNotFound:
        raise _no_such_file(file_id) from None


def _no_such_file(file_id: str) -> ApiError:
    return ApiError(404, f"No such File object: {file_id}", param="id")


async def _opened(caller: Caller, file: FileRecord, start: int, stop: int) -> AsyncIterator[bytes]:
    """The bytes, the first of them read already: an object that is gone must not be a 200."""
    stream = caller.services.storage.get(file.storage_key, start=start, stop=stop)
    try:
        return await begun(stream)
    except StorageError:
        # A file that was deleted meanwhile is an unknown file: 404. An operator may read another
        # tenant's.
        await _file(caller, file.id, file.tenant)
        raise


def _range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Start and stop of the one range that ``header`` asks for; None: everything.

    What is no single range of bytes is ignored, as RFC 9110 wants it. Raises 416 for one that
    begins behind the end.
    """
    match = re.fullmatch(r"\s*bytes\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*", header or "")
    if match is None or match.group(1, 2) == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    if start >= size_bytes:
        raise ApiError(
            416,
            f"The file has {size_bytes} bytes, and the range begins behind them.",
            headers={"content-range": f"bytes */{size_bytes}"},
        )
    return start, stop


def _disposition(filename: str) -> str:
    """``attachment``, with the name in ASCII for all and in UTF-8 for those who read RFC 6266."""
    # A file that was read from a path or from S3 has its name there, which may hold a line end.
    filename = _CONTROL.sub("_", filename)
    ascii_name = filename.encode("ascii", "replace").decode()
    quoted = ascii_name.replace("\\", "\\\\").replace('"', '\\"')
    plain = f'attachment; filename="{quoted}"'
    if ascii_name == filename:
        return plain
    return f"{plain}; filename*=UTF-8''{quote(filename, safe='')}"
