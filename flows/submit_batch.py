"""submit-batch: a batch from Prefect, by `prefect deployment run` or the form in the UI."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.states import Failed, State

from batchyard.errors import BatchyardError, RequestRefused
from batchyard.steps.create import BatchRequest, create_batch
from batchyard.storage.location import LocalFile, WebUrl, parse_location
from flows.process_batch import process_batch
from flows.worker import worker_services


@flow(name="submit-batch", flow_run_name="{input}", persist_result=False)
async def submit_batch(
    input: str,  # noqa: A002 - the name that people fill in
    output: str | None = None,
    errors: str | None = None,
    model: str | None = None,
    endpoint: str | None = None,
    completion_window: str = "24h",
    metadata: dict[str, str] | None = None,
) -> State:
    """Create a batch and run it to its end, in this flow run.

    Args:
        input: The JSONL file of requests: an absolute path on the workers' file system,
            s3://bucket/key, or a public http(s) URL.
        output: Where the results go: an absolute path or s3://bucket/key. Empty: they are kept in
            the object store.
        errors: Where the lines that failed go; empty as above.
        model: The model that every line must name. Empty: the one that the first line names.
        endpoint: The endpoint that every line must name, for example /v1/chat/completions.
            Empty: lines may name different ones.
        completion_window: How long the batch may take: a number and m, h or d.
        metadata: Up to 16 pairs of text, kept with the batch.
    """
    try:
        for name, text in (("input", input), ("output", output), ("errors", errors)):
            _check_recordable(name, text)
        async with worker_services() as services:
            batch_id = await create_batch(
                services,
                BatchRequest(
                    input=input,
                    output=output,
                    error=errors,
                    endpoint=endpoint,
                    models=(model,) if model else (),
                    completion_window=completion_window,
                    metadata=metadata,
                ),
            )
    except BatchyardError as error:
        return Failed(message=str(error), data=error)
    return await process_batch(batch_id, return_state=True)


def _check_recordable(name: str, text: str | None) -> None:
    """Prefect records parameters: a presigned URL would stay there, a relative path mislead."""
    if text is None:
        return
    location = parse_location(text)
    if isinstance(location, WebUrl) and str(location) != text:
        raise RequestRefused(
            f"{name} is a URL with a query or a password, which Prefect would record. "
            "Use `batchyard submit`, which keeps it encrypted, or s3://bucket/key.",
            param=name,
            code="invalid_value",
        )
    if isinstance(location, LocalFile) and not Path(text).is_absolute():
        raise RequestRefused(
            f"{name} must be an absolute path: a worker's folder is not yours.",
            param=name,
            code="invalid_value",
        )
