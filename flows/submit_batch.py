"""submit-batch: a batch from Prefect, by `prefect deployment run` or the form in the UI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from prefect import flow
from prefect.states import Failed, State
from pydantic import Field

from batchyard.batch_options import OPTIONS, Value, as_fields, parameter, with_parameters
from batchyard.endpoints import ENDPOINTS
from batchyard.errors import BatchyardError, RequestRefused
from batchyard.steps.create import DEFAULT_TENANT, BatchRequest, check_paths, create_batch
from batchyard.storage.local_file import LocalFile
from batchyard.storage.location import parse_location
from flows.cancel import cancel_its_batch
from flows.control import control_services
from flows.process_batch import take_to_its_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.settings import Settings
    from batchyard.storage.access import Location

# The server checks these before it records a flow run, the UI while the form is filled in.
_NO_SECRET = {"pattern": r"^(?![Hh]\w+://(.*\?|[^/]*@))"}
_ENDPOINTS = {"enum": ["", *ENDPOINTS]}

F = TypeVar("F", bound="Callable[..., Any]")

Place = Annotated[str, Field(json_schema_extra=_NO_SECRET)]
Endpoint = Annotated[str, Field(json_schema_extra=_ENDPOINTS)]


def _with_options(function: F) -> F:
    """The function with the options of a batch that the form has, in its docstring as well."""
    offered = [option for option in OPTIONS if option.form is not None]
    described = "\n        ".join(f"{option.name}: {option.form}" for option in offered)
    function.__doc__ = (function.__doc__ or "").replace("{of_batch}", described)
    return with_parameters(
        function,
        [
            parameter(option, *((bool, False) if option.value is Value.FLAG else (str, "")))
            for option in offered
        ],
    )


@flow(
    name="submit-batch",
    flow_run_name="{input}",
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
    *,
    metadata: dict[str, str] = {},  # noqa: B006 - read only; None would be a choice in the form
    **of_batch: Any,
) -> State:
    """Run a file of requests to its result file.

    Args:
        input: The JSONL file of requests: an absolute path that the workers can read,
            s3://bucket/key, or a public http(s) URL. A URL with a signature belongs to the
            command `batchyard submit`, which does not show it to Prefect.
        output: Where the answers go: an absolute path or s3://bucket/key. Empty: they stay in
            Batchyard's own store, under their file id.
        errors: Where the lines that failed go, in the same way.
        model: The model that every line must name. Empty: the one that the first line names.
        endpoint: The endpoint that every line must name. Empty: lines may name different ones.
        completion_window: How long the batch may take: a number and m, h or d.
        priority: The tenant's batch with the highest priority runs first.
        tenant: The tenant that the batch belongs to. Empty: the tenant of this deployment, or
            `default` if it has none. If it has one, no other tenant can be named.
        {of_batch}
        metadata: Up to 16 pairs of text, kept with the batch, for example {"team": "search"}.
    """
    try:
        source = _recordable("input", input)
        results = _recordable("output", output) if output else None
        failed = _recordable("errors", errors) if errors else None
        async with control_services() as services:
            check_paths(services.settings, output=results, errors=failed)
            batch_id = await create_batch(
                services,
                BatchRequest(
                    input=source,
                    output=results,
                    error=failed,
                    endpoint=endpoint or None,
                    models=(model,) if model else (),
                    completion_window=completion_window,
                    metadata=metadata or None,
                    priority=priority,
                    tenant=_tenant(services.settings, tenant),
                    **as_fields({name: given or None for name, given in of_batch.items()}),
                ),
                owner=services.owner,
            )
            return await take_to_its_end(services, batch_id)
    except BatchyardError as error:
        return Failed(message=str(error), data=error)


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
