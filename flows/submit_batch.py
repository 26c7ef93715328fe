"""submit-batch: a batch from Prefect, by `prefect deployment run` or the form in the UI."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Failed, State
from pydantic import Field

from batchyard.batch.batch_options import (
    Door,
    Value,
    describe_parameters,
    options_of,
    parameter,
    with_parameters,
)
from batchyard.errors import BatchyardError, RequestRefused
from batchyard.lines.endpoints import ENDPOINTS
from batchyard.locations.local_file import LocalFile
from batchyard.locations.location import parse_location
from batchyard.steps.create.create import DEFAULT_TENANT, create_batch, request_of
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
    from batchyard.steps.create.create import BatchRequest

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
            r"^(?![Hh][Tt]\w+://(.*\?|[^/]*@))",
            "an absolute path, s3://bucket/key (or az://, gs://, hf://), or a URL "
            f"{_URL_FOR_RECORDS} (use `batchyard submit` for a URL with a signature)",
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
    Value.NUMBER: (int, 0),
    Value.ENDPOINT: (Endpoint, ""),
    Value.URL: (WebhookUrl, ""),
    Value.OBJECTS: (list[dict[str, str]], []),
    Value.PAIRS: (dict[str, str], {}),
    Value.OBJECT: (dict[str, Any], {}),
}
"""The annotation and the default of an option in the form; of all others: a text."""
_OFFERED = options_of(Door.FORM)


def _with_options(function: F) -> F:
    """The function with the options of a batch that the form has, in its docstring as well."""
    describe_parameters(function, [f"{each.name}: {each.help(Door.FORM)}" for each in _OFFERED])
    return with_parameters(function, [parameter(each, *_field(each)) for each in _OFFERED])


def _field(option: BatchOption) -> tuple[Any, Any]:
    """The option's annotation and its default."""
    if option.choices is None:
        annotation, default = _FIELDS.get(option.value, (str, ""))
        return annotation, default if option.default is None else option.default
    choices = [each.value for each in option.choices]
    return Annotated[str, Field(json_schema_extra={"enum": choices})], choices[0]


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
    **of_batch: Any,
) -> State:
    """Run a file of requests to its result file.

    A flow that calls this one gets the batch's id, status, counts and files.

    Args:
        input: The JSONL file of requests: an absolute path that the workers can read,
            s3://bucket/key (or az://, gs://, hf://), or a public http(s) URL. A URL with a
            signature belongs to the command `batchyard submit`, which does not show it to Prefect.
        output: Where the answers go: an absolute path or s3://bucket/key (or az://, gs://, hf://).
            Empty: they stay in Batchyard's own store, under their file id.
        errors: Where the lines that failed go, in the same way.
        {of_batch}
    """
    try:
        await name_run(input)
        source = _recordable("input", input)
        results = _recordable("output", output) if output else None
        failed = _recordable("errors", errors) if errors else None
        async with control_services() as services:
            check_paths(services.settings, output=results, errors=failed)
            asked = batch_request(services.settings, **of_batch)
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


def batch_request(settings: Settings, *, tenant: str, **of_batch: Any) -> BatchRequest:
    """What the parameters besides the places ask for; raises RequestRefused."""
    _check_receivers(of_batch)
    given = {name: each or None for name, each in of_batch.items()}
    return request_of(given, tenant=_tenant(settings, tenant))


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
    for option in _OFFERED:
        url = of_batch.get(option.name) if option.value is Value.URL else None
        if url and ("?" in url or "@" in url):
            raise RequestRefused(
                f"{option.name} is a URL with a query or a password, which Prefect would record. "
                "Use `batchyard webhooks create` or `batchyard submit`, which keep it encrypted.",
                param=option.name,
                code="invalid_value",
            )


def _recordable(name: str, text: str) -> Location:
    """Prefect records parameters: a presigned URL would stay there, a relative path mislead."""
    location = parse_location(text)
    if str(location) != location.text:
        raise RequestRefused(
            f"{name} is a URL with a query or a password, which Prefect would record. "
            "Use `batchyard submit`, which keeps it encrypted, or a place in a bucket.",
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
