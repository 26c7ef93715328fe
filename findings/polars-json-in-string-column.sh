#!/usr/bin/env bash
# polars 2.1.0: read_ndjson with pl.String for a column of objects does not write valid JSON.
#
# One would guess: with schema={"response": pl.String}, an object in the column comes back as its
# JSON text, so that json.loads gives the object of the file.
# What is seen: quotes and newlines are escaped, backslashes and tabs are not. A text with a tab
# gives text that json.loads refuses. A text with a backslash and an n, such as a Windows path or
# source code, gives valid JSON with a newline in its place: another value, without any error.
#
# Exits with 0 as long as it is so, and with another status once the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check polars==2.1.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import json

import polars as pl

texts = ["plain", 'a "quote"', "a\nnewline", "a\ttab", r"C:\new"]
with open("results.jsonl", "w", encoding="utf-8") as file:
    for text in texts:
        file.write(json.dumps({"response": {"text": text}}) + "\n")

seen = []
column = pl.read_ndjson("results.jsonl", schema={"response": pl.String})["response"]
for text, read in zip(texts, column, strict=True):
    try:
        found = json.loads(read)["text"]
        outcome = "same" if found == text else f"changed to {found!r}"
    except json.JSONDecodeError as error:
        outcome = f"invalid JSON ({error.msg})"
    seen.append(outcome)
    print(f"{text!r}: {outcome}")

expected = ["same"] * 3 + ["invalid JSON (Invalid control character at)", "changed to 'C:\\new'"]
assert seen == expected, "The behaviour has changed."
PYTHON
