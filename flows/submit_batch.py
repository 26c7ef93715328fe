"""submit-batch: a batch from Prefect, by `prefect deployment run` or the form in the UI."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Failed, State
from pydantic import Field

from batchyard.batch.batch_options import (
    OPTIONS,
    Value,
    as_fields,
    describe_parameters,
    parameter,
    with_parameters,
)
from batchyard.batch.chains import stages_of
from batchyard.errors import BatchyardError, RequestRefused
from batchyard.files.upload import LEAST_LIFETIME_SECONDS, MOST_LIFETIME_SECONDS
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location
from batchyard.steps.create.create import DEFAULT_TENANT, BatchRequest, create_batch, parse_duration
from batchyard.steps.create.destinations import check_paths
from flows.process.cancel import cancel_its_batch
from flows.process.control import control_services
from flows.process_batch import take_to_its_end
from flows.shown.outcome import kept_outcome
from flows.shown.run_page import name_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.batch.batch_options import BatchOption
    from batchyard.locations.access import Location
    from batchyard.settings import Settings

F = TypeVar("F", bound="Callable[..., Any]")


def _only(pattern: str, what: str) -> dict[str, Any]:
    """The schema of a text. The server checks it before it records a flow run, the UI at once.

    For what is refused, JSON Schema says that ``what`` was expected. Of a pattern it would quote
    the regular expression, and the refused URL.
    """
    return {"if": {"pattern": pattern}, "else": {"const": what}}


_URL_FOR_RECORDS = "without a query and a password, because Prefect records it"
Place = Annotated[
    str,
    Field(
        json_schema_extra=_only(
            r"^(?![Hh]\w+://(.*\?|[^/]*@))",
            f"an absolute path, s3://bucket/key, or a URL {_URL_FOR_RECORDS} "
            "(use `batchyard submit` for a URL with a signature)",
        )
    ),
]
WebhookUrl = Annotated[
    str,
    Field(
        json_schema_extra=_only(
            r"^($|[Hh][Tt][Tt][Pp][Ss]?://[^/@?]+(/[^?]*)?$)",
            f"an https URL {_URL_FOR_RECORDS} "
            "(use `batchyard webhooks create` or `batchyard submit` for a secret URL)",
        )
    ),
]
Endpoint = Annotated[str, Field(json_schema_extra={"enum": ["", *ENDPOINTS]})]

_FIELDS: dict[Value, tuple[Any, Any]] = {
    Value.FLAG: (bool, False),
    Value.URL: (WebhookUrl, ""),
    Value.OBJECT: (dict[str, Any], {}),
}
"""The annotation and the default of an option in the form; of all others: a text."""


def _with_options(function: F) -> F:
    """The function with the options of a batch that the form has, in its docstring as well."""
    offered = [option for option in OPTIONS if option.form is not None]
    describe_parameters(function, [f"{option.name}: {option.form}" for option in offered])
    return with_parameters(
        function,
        [parameter(option, *_field(option)) for option in offered],
    )


def _field(option: BatchOption) -> tuple[Any, Any]:
    """The option's annotation and its default."""
    if not option.choices:
        return _FIELDS.get(option.value, (str, ""))
    chosen = Field(json_schema_extra={"enum": list(option.choices)})
    return Annotated[str, chosen], str(option.choices[0])


@flow(
    name="submit-batch",
    persist_result=False,
    on_cancellation=[cancel_its_batch],
)
@_with_options
async def submit_batch(
    input: Place,  # noqa: A002 - the name that people fill in
    output: Place = "",
    errors: Place = "",
    model: str = "",
    endpoint: Endpoint = "",
    completion_window: str = "24h",
    priority: int = 0,
    tenant: str = "",
    output_expires_after: str = "",
    template: str = "",
    *,
    metadata: dict[str, str] = {},  # noqa: B006 - read only; None would be a choice in the form
    then: list[dict[str, str]] = [],  # noqa: B006 - the same
    **of_batch: Any,
) -> State:
    """Run a file of requests to its result file.

    A flow that calls this one gets the batch's id, status, counts and files.

    Args:
        input: The JSONL file of requests: an absolute path that the workers can read,
            s3://bucket/key, or a public http(s) URL. A URL with a signature belongs to the
            command `batchyard submit`, which does not show it to Prefect.
        output: Where the answers go: an absolute path or s3://bucket/key. Empty: they stay in
            Batchyard's own store, under their file id.
        errors: Where the lines that failed go, in the same way.
        model: The model that every line must name. Empty: the one that the first line names.
        endpoint: The endpoint that every line must name. Empty: lines may name different ones.
        completion_window: How long the batch may take: a number and m, h or d. background: it
            runs only when nothing else wants its engine.
        priority: The tenant's batch with the highest priority runs first.
        tenant: The tenant that the batch belongs to. Empty: the tenant of this deployment, or
            `default` if it has none. If it has one, no other tenant can be named.
        output_expires_after: How long the result files are kept: a number and m, h or d, from 1h
            to 30d. Empty: 30 days.
        template: The text of a Jinja2 template that makes a request's body of each row, where the
            input is a dataset: Parquet, Arrow or JSON lines, also a folder or a pattern of such
            files. An output that ends in .parquet has the rows and their answers.
        {of_batch}
        metadata: Up to 16 pairs of text, kept with the batch, for example {"team": "search"}.
        then: Further stages that each line goes through, for example
            [{"endpoint": "/v1/embeddings", "template": "{\"input\": {{ content | tojson }}}"}].
    """
    try:
        await name_run(input)
        source = _recordable("input", input)
        results = _recordable("output", output) if output else None
        failed = _recordable("errors", errors) if errors else None
        async with control_services() as services:
            check_paths(services.settings, output=results, errors=failed)
            asked = batch_request(
                services.settings,
                model=model,
                endpoint=endpoint,
                completion_window=completion_window,
                priority=priority,
                tenant=tenant,
                output_expires_after=output_expires_after,
                template=template,
                metadata=metadata,
                then=then,
                **of_batch,
            )
            batch_id = await create_batch(
                services,
                replace(asked, input=source, output=results, error=failed),
                owner=services.owner,
                # From its first moment: a cancellation may come before its lease is held.
                flow_run_id=str(flow_run.id),
            )
            end = await take_to_its_end(services, batch_id)
            state = await end.reported()
            outcome = await kept_outcome(services, batch_id)
            if state.is_completed():
                state.data = outcome
            return state
    except BatchyardError as error:
        return Failed(message=str(error), data=error)


def batch_request(
    settings: Settings,
    *,
    model: str,
    endpoint: str,
    completion_window: str,
    priority: int,
    tenant: str,
    output_expires_after: str,
    template: str,
    metadata: dict[str, str],
    then: list[dict[str, str]],
    **of_batch: Any,
) -> BatchRequest:
    """What the parameters besides the places ask for; raises RequestRefused."""
    _check_receivers(of_batch)
    return BatchRequest(
        endpoint=endpoint or None,
        models=(model,) if model else (),
        completion_window=completion_window,
        metadata=metadata or None,
        priority=priority,
        tenant=_tenant(settings, tenant),
        output_lifetime_seconds=_lifetime(output_expires_after),
        template=template or None,
        then=stages_of(then),
        **as_fields({name: given or None for name, given in of_batch.items()}),
    )


def _tenant(settings: Settings, asked: str) -> str:
    """The tenant that the operator has fixed for this deployment, or the one that is asked for."""
    if settings.tenant is not None and asked not in {"", settings.tenant}:
        raise RequestRefused(
            f"This deployment is for batches of the tenant {settings.tenant}: "
            "leave `tenant` empty.",
            param="tenant",
            code="invalid_value",
        )
    return settings.tenant or asked or DEFAULT_TENANT


def _check_receivers(of_batch: dict[str, Any]) -> None:
    """Refuse URLs that are secrets where the server has not: a subflow is not checked by it."""
    for option in OPTIONS:
        url = of_batch.get(option.name) if option.value is Value.URL else None
        if url and ("?" in url or "@" in url):
            raise RequestRefused(
                f"{option.name} is a URL with a query or a password, which Prefect would record. "
                "Use `batchyard webhooks create` or `batchyard submit`, which keep it encrypted.",
                param=option.name,
                code="invalid_value",
            )


def _lifetime(text: str) -> int | None:
    """The seconds after which result files expire; None: what is usual."""
    if not text:
        return None
    seconds = parse_duration(text, param="output_expires_after")
    if not LEAST_LIFETIME_SECONDS <= seconds <= MOST_LIFETIME_SECONDS:
        raise RequestRefused(
            "output_expires_after must be between 1h and 30d.",
            param="output_expires_after",
            code="invalid_value",
        )
    return seconds


def _recordable(name: str, text: str) -> Location:
    """Prefect records parameters: a presigned URL would stay there, a relative path mislead."""
    location = parse_location(text)
    if str(location) != location.text:
        raise RequestRefused(
            f"{name} is a URL with a query or a password, which Prefect would record. "
            "Use `batchyard submit`, which keeps it encrypted, or s3://bucket/key.",
            param=name,
            code="invalid_value",
        )
    if isinstance(location, LocalFile) and not location.path.is_absolute():
        raise RequestRefused(
            f"{name} must be an absolute path, because workers run in another folder.",
            param=name,
            code="invalid_value",
        )
    return location
