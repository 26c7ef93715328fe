"""Create a batch: check what was asked, write the row. Acknowledged is durable."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchyard.batch.batch_options import RECEIVER_OPTIONS, OnInvalid, Validation, as_fields
from batchyard.batch.chains import Stage, check_stages, stages_of
from batchyard.batch.error_threshold import ErrorThreshold
from batchyard.batch_error import InputPart
from batchyard.datasets.files import is_table
from batchyard.errors import ModelNotFound, RequestRefused
from batchyard.intervals import DAY_SECONDS, HOUR_SECONDS, MINUTE_SECONDS
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.lines.templates import TemplateRefused, check_template
from batchyard.locations.several import Several
from batchyard.logs.tracing import span
from batchyard.notify.email import check_address
from batchyard.processes.threads import in_thread
from batchyard.results.output_rules import OnInvalidOutput
from batchyard.schedule.forecast import OpenWork
from batchyard.schedule.turns import BACKGROUND_WINDOW
from batchyard.services.quotas import default_quota
from batchyard.services.user_locations import UserLocations
from batchyard.services.webhook_checks import check_webhook_url
from batchyard.steps.create.destinations import absolute, check_destinations, url_facts
from batchyard.steps.create.offered import check_offered, endpoints_not_served
from batchyard.steps.forecast.forecast import check_window
from batchyard.store import BatchOptions, NewBatch
from batchyard.store.tables.file import FILE_LIFETIME_SECONDS, LEAST_LIFETIME_SECONDS
from batchyard.wire import new_file_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.batch.batch_options import DeliveryKind
    from batchyard.locations.access import Location
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.store import BatchRecord, IdempotencyKey, NewFile

DEFAULT_TENANT = "default"
"""The tenant of batches that name none."""
DATASET_ENDPOINT = "/v1/chat/completions"
"""Where the requests of a dataset go that names no endpoint."""
MIXED_ENDPOINTS = "mixed"
"""What ``endpoint`` says of a batch whose lines name several."""

MAX_PRIORITY = 1_000_000
WINDOW_PATTERN = "([1-9][0-9]{0,4})([mhd])"
WINDOW_SECONDS = {"m": MINUTE_SECONDS, "h": HOUR_SECONDS, "d": DAY_SECONDS}
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What is asked for.

    The input is at a location, was uploaded as ``input_file_id``, or is joined from
    ``input_file_ids``: one of these, and whether it is there is found out when the batch runs.
    With a location, ``input_file_id`` is the id that the copy of the input will have.
    ``endpoint`` None: each line names its own.
    ``models``: the names that lines may carry; empty for any. ``output`` or ``error`` None: that
    file is only kept in the object store. ``public_urls``: a client asks. The URLs must lead to
    public addresses unless the settings allow others, and the limits of one file apply. Who is
    told when the batch has ended: the ``receivers``, each a URL by its channel and always as a
    client's, and the address ``notify_email``.
    ``deduplicate``: requests that ask the same and leave nothing to chance run once.
    ``ledger``: what each line used and cost is kept beside the results.
    ``message_requests``: it is a Message Batch with so many requests; None: it is not.
    ``on_invalid``: what bad lines do, an :class:`~batchyard.batch.batch_options.OnInvalid`.
    ``validation``: how much of each line is checked, a :class:`.Validation`.
    ``any_body``: the file is the operator's own, and no field or URL in its bodies is refused.
    ``on_invalid_output``: what answers do that are bad, for :class:`.OnInvalidOutput`.
    ``error_threshold``: when the batch is stopped, for :class:`.ErrorThreshold`.
    ``template``: the input is a dataset, and this Jinja2 template makes a request of each row.
    ``then``: the further stages that its lines go through.
    ``is_inline``: nobody runs it but who has made it, or resumes it by its id.
    ``traceparent``: the caller's span, whose trace the batch continues where tracing is on.
    """

    input: Location | None = None
    input_file_id: str | None = None
    input_file_ids: tuple[str, ...] = ()
    output: Location | None = None
    error: Location | None = None
    endpoint: str | None = None
    models: tuple[str, ...] = ()
    mixed_models: bool = False
    completion_window: str = "24h"
    metadata: Mapping[str, str] | None = field(default=None)
    priority: int = 0
    tenant: str = DEFAULT_TENANT
    output_lifetime_seconds: int | None = None
    receivers: Mapping[DeliveryKind, str] = field(default_factory=dict)
    notify_email: str | None = None
    public_urls: bool = False
    deduplicate: bool = False
    ledger: bool = False
    message_requests: int | None = None
    on_invalid: str = OnInvalid.FAIL
    validation: str = Validation.BASIC
    any_body: bool = False
    error_threshold: str | None = None
    template: str | None = None
    on_invalid_output: Mapping[str, Any] | None = None
    then: tuple[Stage, ...] = ()
    is_inline: bool = False
    traceparent: str | None = None


def request_of(given: Mapping[str, Any], **own: Any) -> BatchRequest:
    """What one way in asks for: what was given for options, by their names, and its ``own`` fields.

    Raises RequestRefused for stages and durations that cannot be read.
    """
    fields = as_fields(given)
    if model := fields.pop("model", None):
        fields["models"] = (model,)
    if (lifetime := fields.pop("output_expires_after", None)) is not None:
        fields["output_lifetime_seconds"] = _lifetime(lifetime)
    if "then" in fields:
        fields["then"] = stages_of(fields["then"])
    return BatchRequest(**fields, **own)


def _lifetime(asked: str | int) -> int:
    """The seconds after which result files expire, where seconds have been checked."""
    if isinstance(asked, int):
        return asked
    seconds = parse_duration(asked, param="output_expires_after")
    if not LEAST_LIFETIME_SECONDS <= seconds <= FILE_LIFETIME_SECONDS:
        raise RequestRefused(
            "output_expires_after must be between 1h and 30d.",
            param="output_expires_after",
            code="invalid_value",
        )
    return seconds


async def create_batch(
    services: Services,
    request: BatchRequest,
    *,
    owner: str | None = None,
    flow_run_id: str | None = None,
) -> str:
    """The id of a new batch: :func:`accept_batch`, for those who need no more."""
    return (await accept_batch(services, request, owner=owner, flow_run_id=flow_run_id)).id


async def accept_batch(
    services: Services,
    request: BatchRequest,
    *,
    input_file: NewFile | None = None,
    owner: str | None = None,
    flow_run_id: str | None = None,
    batches_per_hour: int | None = None,
    idempotency: IdempotencyKey | None = None,
) -> BatchRecord:
    """Write the batch's row. Nothing has been read or run yet.

    With an ``owner`` the batch is leased to it; ``input_file``, ``flow_run_id``,
    ``batches_per_hour`` and ``idempotency`` are those of
    :meth:`~batchyard.store.Batches.create`, and it raises what that does. Raises
    :class:`~batchyard.errors.RequestRefused`, :class:`~batchyard.errors.WindowUnattainable`, and
    :class:`~batchyard.errors.StorageError` for a location that can never work.
    """
    if request.template is not None and request.endpoint is None:
        request = replace(request, endpoint=DATASET_ENDPOINT)
    with span("batch.create", request.traceparent, tenant=request.tenant) as made:
        new = await _checked(services, request, made.traceparent)
        batch = await services.store.batches.create(
            new,
            input_file=input_file,
            quota=default_quota(services),
            batches_per_hour=batches_per_hour,
            owner=owner,
            lease_seconds=services.settings.batch_lease_seconds,
            flow_run_id=flow_run_id,
            idempotency=idempotency,
        )
        made.note(batch=batch.id)
    if owner is not None and services.held is not None:
        services.held.keep(batch)
    return batch


async def _checked(services: Services, request: BatchRequest, traceparent: str | None) -> NewBatch:
    if request.endpoint is not None and request.endpoint not in ENDPOINTS:
        raise RequestRefused(
            f"endpoint must be one of {', '.join(ENDPOINTS)}.",
            param="endpoint",
            code="invalid_value",
        )
    for name, choices in (("on_invalid", OnInvalid), ("validation", Validation)):
        if getattr(request, name) not in list(choices):
            raise RequestRefused(
                f"{name} must be one of {', '.join(choices)}.", param=name, code="invalid_value"
            )
    check_metadata(request.metadata)
    check_priority(request.priority)
    if request.error_threshold is not None:
        ErrorThreshold.parse(request.error_threshold)
    _check_dataset(request)
    if request.template is not None or request.then:
        # In a thread: a template can be written so that its parser takes a second.
        await in_thread(_check_templates, request)
    await _check_notices(request, services.settings)
    window_seconds = parse_window(request.completion_window, services.settings)
    output, error = await check_destinations(
        request.output,
        request.error,
        taken={"input": request.input},
        dataset=None if request.template is None else request.input,
    )
    places = UserLocations(
        input=absolute(request.input), output=output, error=error, template=request.template
    )
    batch = NewBatch(
        input_file_id=request.input_file_id or new_file_id(),
        endpoint=request.endpoint or MIXED_ENDPOINTS,
        completion_window=request.completion_window,
        window_seconds=window_seconds,
        metadata=dict(request.metadata) if request.metadata is not None else None,
        priority=request.priority,
        tenant=request.tenant,
        options=_options(services.settings, request, places, traceparent),
        locations=places.to_text(request.receivers),
        output_lifetime_seconds=request.output_lifetime_seconds,
        notify_email=request.notify_email,
        message_requests=request.message_requests,
        is_inline=request.is_inline,
        then=request.then,
    )
    model = request.models[0] if len(request.models) == 1 else None
    if model is not None:
        await check_model(services, model, is_client=request.public_urls, param="model")
    await _check_endpoint(services, request.endpoint, model)
    for number, stage in enumerate(request.then):
        if stage.model is not None:
            param = f"then[{number}].model"
            await check_model(services, stage.model, is_client=request.public_urls, param=param)
    if model is not None:
        await _check_backlog(services, batch, model)
    return batch


def _options(
    settings: Settings, request: BatchRequest, places: UserLocations, traceparent: str | None
) -> BatchOptions:
    return BatchOptions(
        mixed_endpoints=request.endpoint is None,
        mixed_models=request.mixed_models,
        models=request.models,
        public_urls=request.public_urls,
        deduplicate=request.deduplicate,
        ledger=request.ledger or settings.ledger,
        on_invalid=OnInvalid(request.on_invalid),
        validation=Validation(request.validation),
        any_body=request.any_body,
        error_threshold=request.error_threshold,
        on_invalid_output=_output_rule(settings, request),
        traceparent=traceparent,
        urls=url_facts(places.output, places.error),
        parts=tuple(InputPart(file_id) for file_id in request.input_file_ids),
        is_rendered=request.template is not None,
    )


def _check_dataset(request: BatchRequest) -> None:
    if request.template is None:
        places = request.input.places if isinstance(request.input, Several) else [request.input]
        table = next((each for each in places if each is not None and is_table(each)), None)
        if table is not None:
            raise RequestRefused(
                f"{table} is a dataset: give the template that makes a request from each row.",
                param="template",
                code="missing_required_parameter",
            )
        return
    if request.input is None:
        raise RequestRefused(
            "A template is for a dataset, which is read from a URL or a path: do not upload it.",
            param="template",
            code="invalid_value",
        )


def _check_templates(request: BatchRequest) -> None:
    if request.template is not None:
        try:
            check_template(request.template)
        except TemplateRefused as error:
            raise RequestRefused(
                f"The template cannot be used: {error}.", param="template", code="invalid_template"
            ) from None
    check_stages(request.then)


async def check_model(services: Services, model: str, *, is_client: bool, param: str) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for a model that no engine serves.

    Only an operator reads how to add it.
    """
    try:
        await check_offered(services, model)
    except ModelNotFound as error:
        words = str(error) if is_client else f"{error} {error.remedy}"
        raise RequestRefused(words, param=param, code=error.code) from None


async def _check_endpoint(services: Services, endpoint: str | None, model: str | None) -> None:
    if endpoint is None:
        return
    for why in (await endpoints_not_served(services, [endpoint], model)).values():
        raise RequestRefused(why, param="endpoint", code="invalid_value")


async def _check_backlog(services: Services, batch: NewBatch, model: str) -> None:
    """What waits already may be too much. How much is new is known when the input is read."""
    now = int(await services.store.database.now())
    new = OpenWork(
        batch.id,
        model,
        batch.tenant,
        now + batch.window_seconds,
        batch.priority,
        now,
        1.0,
        is_background=batch.completion_window == BACKGROUND_WINDOW,
    )
    await check_window(services, new, batch.completion_window)


async def _check_notices(request: BatchRequest, settings: Settings) -> None:
    """Receivers of the batch's end can be notified, as far as is known now."""
    for kind, url in request.receivers.items():
        await check_webhook_url(url, settings, param=RECEIVER_OPTIONS[kind])
    if request.notify_email is None:
        return
    try:
        check_address(request.notify_email)
    except ValueError:
        raise RequestRefused(
            "'notify_email' must be one e-mail address.",
            param="notify_email",
            code="invalid_value",
        ) from None
    if settings.smtp.host is None:
        raise RequestRefused(
            "This server sends no e-mail: leave 'notify_email' out, or have a mail server "
            "configured.",
            param="notify_email",
            code="email_not_configured",
        )


def check_priority(priority: int) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for one that is out of all proportion."""
    if abs(priority) > MAX_PRIORITY:
        raise RequestRefused(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}.",
            param="priority",
            code="invalid_value",
        )


def parse_window(text: str, settings: Settings) -> int:
    """Seconds of a completion window such as ``24h``, ``90m``, ``7d`` or ``background``.

    Raises :class:`~batchyard.errors.RequestRefused` for anything else, and for too long a window.
    """
    if text == BACKGROUND_WINDOW:
        return settings.background_days * DAY_SECONDS
    seconds = parse_duration(text, param="completion_window", other=BACKGROUND_WINDOW)
    if seconds > settings.max_window_days * DAY_SECONDS:
        raise RequestRefused(
            f"completion_window may be {settings.max_window_days}d at most.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


def parse_duration(text: str, *, param: str, other: str | None = None) -> int:
    """Seconds of a duration such as ``24h``, of any length.

    Raises :class:`~batchyard.errors.RequestRefused`, which names ``param``, and ``other`` as what
    it might be instead.
    """
    match = re.fullmatch(WINDOW_PATTERN, text)
    if match is None:
        instead = f", or {other}" if other else ""
        raise RequestRefused(
            f"{param} must be a number and m, h or d, for example 24h{instead}.",
            param=param,
            code="invalid_value",
        )
    return int(match.group(1)) * WINDOW_SECONDS[match.group(2)]


def _output_rule(settings: Settings, request: BatchRequest) -> OnInvalidOutput | None:
    if request.on_invalid_output is None:
        return None
    policy = None if request.any_body else settings.bodies.to_policy()
    return OnInvalidOutput.of(request.on_invalid_output, policy)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for what OpenAI's rules do not allow."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise RequestRefused(
            f"metadata may have at most {MAX_METADATA} pairs.",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise RequestRefused(
                "metadata values must be strings.", param=f"metadata.{key}", code="invalid_type"
            )
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise RequestRefused(
                f"metadata keys may have {MAX_METADATA_KEY} characters, "
                f"values {MAX_METADATA_VALUE}.",
                param=f"metadata.{key[:MAX_METADATA_KEY]}",
                code="string_above_max_length",
            )
