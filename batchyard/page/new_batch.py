"""A new batch from a file: it is uploaded, estimated, and becomes a batch if that looks right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from batchyard.api.batches.batches import accepted_before
from batchyard.api.files.files import read_form as file_form
from batchyard.api.http.api_error import ApiError
from batchyard.api.http.auth import allowed, refuse_nul
from batchyard.api.http.body import body_stream, has_too_many_values
from batchyard.api.http.errors import missing
from batchyard.api.http.session import (
    CSRF_FIELD,
    CSRF_HEADER,
    LoginNeeded,
    PageCaller,
    csrf_token,
    is_same,
    read_form,
    session_holder,
)
from batchyard.batch.batch_options import Door, options_of
from batchyard.errors import ObjectTooLarge, RecordNotFound, RequestRefused, StorageError
from batchyard.files.failures import Group, grouped_refusals
from batchyard.files.upload import FileUse, upload_file
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.framing import read_lines
from batchyard.locations.local_file import LocalFile
from batchyard.page.form_key import key_of
from batchyard.page.route import PageRoute, shell
from batchyard.page.routes import answers_of
from batchyard.page.words import compact, count, percent, short, short_duration, size
from batchyard.processes.tenant_turns import TenantTurns
from batchyard.processes.threads import in_thread
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.services.segments.local_copy import local_copy
from batchyard.steps.create.create import MIXED_ENDPOINTS, accept_batch, parse_window, request_of
from batchyard.steps.forecast.known_lengths import read_lengths

if TYPE_CHECKING:
    from pathlib import Path

    from batchyard.api.http.auth import Caller
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.steps.estimate import Estimate
    from batchyard.steps.forecast.known_model import Known
    from batchyard.store import FileRecord

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_SEE_OTHER: Final = 303
_WINDOWS: Final = ("1h", "6h", "24h", "72h", "7d", BACKGROUND_WINDOW)
_LONGEST_FIRST_LINE: Final = 1024**2
_MOST_MODEL_CHARS: Final = 200
_TURNS: Final = TenantTurns(1)
"""An estimate takes a core for up to a minute, and the API has other requests to answer."""


class _Line(msgspec.Struct):
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatePage:
    """The estimate of a file, as text."""

    file_id: str
    filename: str
    size: str
    facts: list[tuple[str, str]]
    groups: list[Group]
    bad_lines: str
    """A heading; empty: the file has no errors."""
    may_run: bool
    """Whether there are good lines, and nothing is wrong with the file as a whole."""
    endpoint: str
    """The one to offer first."""


@router.get("/new")
async def new(request: Request, caller: PageCaller) -> Response:
    """Choose a file."""
    return shell(request, caller, "new.html", message="")


@router.post("/new")
async def upload(request: Request) -> Response:
    """Store the file, and go to its estimate."""
    refuse_nul(request)
    holder = await session_holder(request)
    if holder is None:
        raise LoginNeeded
    caller = allowed(request, holder)
    sent = file_form(request, caller, file_field="file")

    def use() -> FileUse:
        # The form has the token before the file; a script may send it as a header.
        given = request.headers.get(CSRF_HEADER) or sent.fields.get(CSRF_FIELD, "")
        if not is_same(csrf_token(request), given):
            raise ApiError(403, "This form belongs to another session: load the page again.")
        if sent.file is None or not sent.file.filename:
            raise missing("file")
        return FileUse(sent.file.filename, "batch")

    try:
        content = sent.content(body_stream(request))
        file = await upload_file(caller.services, caller.tenant, content, use, lambda: True)
    except RequestRefused as error:
        return shell(request, caller, "new.html", message=str(error), status=400)
    return RedirectResponse(f"/new/{file.id}", status_code=_SEE_OTHER)


@router.get("/new/{file_id}")
async def estimate(file_id: str, request: Request, caller: PageCaller) -> Response:
    """What to expect of the file, and the form that makes it a batch."""
    return await _estimate_page(request, caller, file_id)


@router.post("/new/{file_id}")
async def create(file_id: str, request: Request, caller: PageCaller) -> Response:
    """Create the batch, and go there; a form that is sent twice makes one."""
    fields = await read_form(request)
    file = await _file(caller, file_id)
    key = key_of(f"POST /new/{file_id}", fields)
    try:
        batch = await accepted_before(caller.services.store, file.tenant, key)
        if batch is None:
            batch = await accept_batch(
                caller.services,
                request_of(
                    _asked(fields),
                    # Of the file's tenant: an operator's batch is in the operator's own tenant too.
                    tenant=file.tenant,
                    input_file_id=file.id,
                    public_urls=True,
                ),
                batches_per_hour=caller.services.settings.quota.batches_per_hour,
                idempotency=key,
            )
    except RequestRefused as error:
        return await _estimate_page(request, caller, file_id, message=str(error))
    request.app.state.request_runner()
    answers_of(request).forget()
    return RedirectResponse(f"/batches/{batch.id}", status_code=_SEE_OTHER)


def _asked(fields: dict[str, str]) -> dict[str, Any]:
    """What the form says of the options that it has."""
    given: dict[str, Any] = {each.name: fields.get(each.name) for each in options_of(Door.PAGE)}
    name = fields.get("metadata", "").strip()
    given["metadata"] = {"name": name} if name else None
    if given["endpoint"] == MIXED_ENDPOINTS:
        given["endpoint"] = None
    return given


async def _estimate_page(
    request: Request, caller: Caller, file_id: str, *, message: str = ""
) -> Response:
    file = await _file(caller, file_id)

    async def ask() -> EstimatePage:
        async with _TURNS.turn(caller.tenant):
            return await estimate_of(caller.services, file)

    # A file never changes, but rates do: the answer is kept for as long as others are.
    found = await answers_of(request).get(("estimate", file.tenant, file.id), ask)
    return shell(
        request,
        caller,
        "estimate.html",
        estimate=found,
        endpoints=[*ENDPOINTS, MIXED_ENDPOINTS],
        windows=windows_of(caller.services.settings),
        message=message,
        status=400 if message else 200,
    )


def windows_of(settings: Settings) -> list[str]:
    """The completion windows to choose from: those that may be asked for here."""

    def may_be(window: str) -> bool:
        try:
            parse_window(window, settings)
        except RequestRefused:
            return False
        return True

    return list(filter(may_be, _WINDOWS))


async def _file(caller: Caller, file_id: str) -> FileRecord:
    try:
        file = await caller.services.store.files.get(file_id, caller.tenant)
    except RecordNotFound:
        raise ApiError(404, f"No uploaded file has the id '{file_id}'.") from None
    if file.purpose != "batch":
        raise ApiError(400, "This file was not uploaded to be the input of a batch.")
    return file


async def estimate_of(services: Services, file: FileRecord) -> EstimatePage:
    """What the page shows of the file.

    Raises 413 for lines with millions of values, :class:`~batchyard.errors.RecordNotFound` for a
    file that was deleted meanwhile, and :class:`~batchyard.errors.StorageError`.
    """
    # NumPy is needed here and nowhere else in this process.
    from batchyard.steps.estimate import Assumptions, estimate_file  # noqa: PLC0415 - see above
    from batchyard.steps.forecast.known_model import Known, known_in  # noqa: PLC0415 - see above

    try:
        async with local_copy(services, file.storage_key) as path:
            number = await in_thread(_costly_line, path, services.settings.limits.max_line_bytes)
            if number is not None:
                raise ApiError(
                    413,
                    f"Line {number:,} of {file.filename} has too many values to be checked here: "
                    "create the batch over the API.",
                )
            find_lengths = partial(read_lengths, services.store, file.tenant)
            place = LocalFile(path)
            assumptions = Assumptions(of_client=True, offer=await services.find_offer(()))
            found = await estimate_file(services.settings, place, assumptions, find_lengths)
            endpoint = await in_thread(first_url, path)
    except ObjectTooLarge:
        # It was uploaded while more was allowed. The message names its place here.
        most = services.settings.limits.max_bytes
        raise ObjectTooLarge(f"The input of a batch may have {most} bytes.") from None
    except StorageError:
        # If it was deleted meanwhile, that is what to say. Otherwise the message is for the log:
        # it names places of the installation.
        await services.store.files.get(file.id, file.tenant)
        raise
    known = Known()
    if found.model is not None:
        known = await known_in(services.store, services.settings, found.model)
    return EstimatePage(
        file_id=file.id,
        filename=file.filename,
        size=size(file.size_bytes),
        facts=_facts(found, known),
        groups=grouped_refusals(found.errors),
        bad_lines=_bad_words(found),
        may_run=found.requests > 0
        and all(each.line is not None or each.code == "more_errors" for each in found.errors),
        endpoint=endpoint if endpoint in ENDPOINTS else MIXED_ENDPOINTS,
    )


def _bad_words(found: Estimate) -> str:
    """How many lines are bad, of which the first errors are listed; or that the file is."""
    if not found.bad_lines:
        return "The file cannot be used" if found.errors else ""
    return f"{count(found.bad_lines)} bad line{'' if found.bad_lines == 1 else 's'}"


def _costly_line(path: Path, max_line_bytes: int) -> int | None:
    """The number of the first line that this process must not parse: it would answer nobody else
    for ten seconds, and need up to fifty times the memory of the line."""
    with path.open("rb") as file:
        return next(
            (
                line.number
                for line in read_lines(file, max_line_bytes)
                if has_too_many_values(line.data or b"")
            ),
            None,
        )


def first_url(path: Path) -> str:
    """What the first line names, which is what nearly all files name in each; empty: nothing."""
    with path.open("rb") as file:
        line = next(read_lines(file, _LONGEST_FIRST_LINE), None)
    try:
        return msgspec.json.decode((line and line.data) or b"", type=_Line).url
    except (ValueError, RecursionError):
        return ""  # the estimate says what is wrong with the line


def _facts(found: Estimate, known: Known) -> list[tuple[str, str]]:
    facts = [
        ("Lines", count(found.requests)),
        # What clients write there has any length, and answers stay in memory.
        ("Model", short(found.model or "none named", _MOST_MODEL_CHARS)),
        ("Prompt tokens", f"about {compact(found.prompt_tokens)}"),
        ("Answer tokens", _answer_words(found)),
    ]
    if found.order is not None:
        order = found.order
        ours, theirs = (percent(each.hit_rate, 1) for each in (order.ours, order.as_written))
        facts.append(("From the cache", f"{ours} in our order, {theirs} in the file's"))
    facts.append(("Time", _time(found, known)))
    if known.hours.windows:
        is_open = known.hours.is_open(known.now)
        words = "batches may run now" if is_open else known.hours.opening_words(known.now)
        facts.append(("Hours of the engine", words))
    return facts


def _answer_words(found: Estimate) -> str:
    tokens = compact(found.output_tokens)
    if not found.learned_requests:
        return f"up to {tokens}, by max_tokens"
    return f"about {tokens}, as earlier answers were"


def _time(found: Estimate, known: Known) -> str:
    seconds, speed = known.seconds_for(found), known.tokens_per_second
    if seconds is None or speed is None:
        return "not known: no batch of this model was measured yet"
    return (
        f"about {short_duration(seconds)} on one engine that has nothing else to do, at "
        f"{compact(speed)} tokens/s"
    )
