#!/usr/bin/env bash
# inspect-ai 0.3.285 with `batch` in its GenerateConfig, openai 3.57.0.
# One refused line of a completed batch fails all three requests: its body is read as a
# ChatCompletion. In an expired or cancelled batch the code of a line, a text, is taken for an
# HTTP status, which fails all three too. The answers that there are get lost.
# Matters for: docs/how-to/client-libraries.md
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q --disable-pip-version-check inspect-ai==0.3.285 openai==3.57.0
cat >"$folder/try.py" <<'PYTHON'
import asyncio

from batch_api import serve
from inspect_ai.model import BatchConfig, GenerateConfig, get_model

BATCH = BatchConfig(size=3, send_delay=1, tick=0.5)


async def outcome(model, number):
    try:
        return (await model.generate(f"question {number}")).completion
    except Exception as error:
        return type(error).__name__


async def main(status):
    model = get_model(
        "openai/m",
        base_url=serve(status),
        api_key="none",
        responses_api=False,
        config=GenerateConfig(batch=BATCH, max_retries=0),
    )
    print(status, await asyncio.gather(*(outcome(model, number) for number in range(3))))


for each in ("completed", "expired", "cancelled"):
    asyncio.run(main(each))
PYTHON
cat >"$folder/expected" <<'TEXT'
completed ['ValidationError', 'ValidationError', 'ValidationError']
expired ['TypeError', 'TypeError', 'TypeError']
cancelled ['TypeError', 'TypeError', 'TypeError']
TEXT
PYTHONPATH=$here "$folder/environment/bin/python" "$folder/try.py" 2>/dev/null | grep -E '^[a-z]+ \[' >"$folder/seen"
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
