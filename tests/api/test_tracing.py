"""A batch that is created over the API continues the caller's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.api.conftest import LINE
from tests.services.traces import CALLER, TRACE, collecting, exported

if TYPE_CHECKING:
    import pytest

    from tests.api.conftest import Api


async def test_the_header_traceparent_names_the_span_above(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as collector:
        client = api.openai()
        file = client.files.create(file=("in.jsonl", LINE), purpose="batch")
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers={"traceparent": CALLER},
        )
        (created,) = await exported(collector, {"batch.create"})
    assert created.trace_id.hex() == TRACE
    assert created.parent_span_id.hex() == CALLER.split("-")[2]
