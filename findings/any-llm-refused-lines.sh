#!/usr/bin/env bash
# any-llm-sdk 1.40.2, `aretrieve_batch_results` of its OpenAI provider.
# It reads the output file only. Of a completed batch of three lines, of which one was refused, it
# returns two results and says nothing of the third. Of an expired or cancelled batch it raises
# "is not yet complete", although the answers that there are can be read.
# Matters for: docs/how-to/client-libraries.md
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q --disable-pip-version-check "any-llm-sdk[openai]==1.40.2"
cat >"$folder/try.py" <<'PYTHON'
import asyncio

from any_llm import AnyLLM
from batch_api import serve


async def main():
    for status in ("completed", "expired", "cancelled"):
        client = AnyLLM.create("openai", api_key="none", api_base=serve(status))
        try:
            found = await client.aretrieve_batch_results("batch_1")
            print(status, [each.custom_id for each in found.results])
        except Exception as error:
            print(status, type(error).__name__)


asyncio.run(main())
PYTHON
cat >"$folder/expected" <<'TEXT'
completed ['0', '2']
expired BatchNotCompleteError
cancelled BatchNotCompleteError
TEXT
PYTHONPATH=$here "$folder/environment/bin/python" "$folder/try.py" >"$folder/seen"
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
