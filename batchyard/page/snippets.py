"""How to get at a batch from elsewhere: with curl, Python and the command line. No key in them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

_CURL: Final = 'curl -H "Authorization: Bearer $OPENAI_API_KEY"'


def snippets_of(batch: BatchRecord, base_url: str) -> list[tuple[str, str]]:
    """Name and text of each; ``base_url`` is where this page was loaded from."""
    url = f"{base_url}/v1"
    has_output = batch.output_file_id is not None
    curl = f"{_CURL} \\\n{shlex.quote(f'{url}/batches/{batch.id}')}"
    python = [
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{url}")  # and OPENAI_API_KEY',
        f'batch = client.batches.retrieve("{batch.id}")',
    ]
    command = f"batchyard watch {batch.id}"
    if has_output:
        file = f"{url}/files/{batch.output_file_id}/content"
        curl = f"{_CURL} -o results.jsonl \\\n{shlex.quote(file)}"
        python.append("client.files.content(batch.output_file_id).write_to_file('results.jsonl')")
        command = f"batchyard results {batch.id} -o results.jsonl"
    return [("curl", curl), ("Python", "\n".join(python)), ("CLI", command)]
