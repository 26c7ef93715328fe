#!/usr/bin/env bash
# distilabel 1.5.3, `OpenAILLM(use_offline_batch_generation=True)`.
# It reads the output file only, sorts what is there by `custom_id` and returns it as a list. Of
# three inputs, of which the second one was refused, it returns two outputs: the answer to the third
# input stands in second place. A batch that has expired or was cancelled raises.
# It imports requests, which nothing that it asks for brings any more.
# Matters for: docs/how-to/client-libraries.md
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q --disable-pip-version-check "distilabel[openai]==1.5.3" requests==2.34.2
cat >"$folder/try.py" <<'PYTHON'
from batch_api import serve
from distilabel.exceptions import DistilabelOfflineBatchGenerationNotFinishedException
from distilabel.models.llms.openai import OpenAILLM

INPUTS = [[{"role": "user", "content": f"question {number}"}] for number in range(3)]

for status in ("completed", "expired", "cancelled"):
    llm = OpenAILLM(
        model="m", api_key="none", base_url=serve(status), use_offline_batch_generation=True
    )
    llm.load()
    try:
        llm.offline_batch_generate(inputs=INPUTS)
    except DistilabelOfflineBatchGenerationNotFinishedException:
        pass
    try:
        print(status, [each["generations"] for each in llm.offline_batch_generate()])
    except Exception as error:
        print(status, type(error).__name__)
PYTHON
cat >"$folder/expected" <<'TEXT'
completed [['answer to 0'], ['answer to 2']]
expired RuntimeError
cancelled RuntimeError
TEXT
PYTHONPATH=$here "$folder/environment/bin/python" "$folder/try.py" 2>/dev/null | grep -E '^(completed|expired|cancelled) ' >"$folder/seen"
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
