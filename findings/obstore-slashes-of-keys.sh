#!/usr/bin/env bash
# obstore 0.12.1: a slash at the beginning or the end of a key is left out without a word.
#
# One would guess: a/ and /a are other keys than a, as they are at Azure, Google and S3, or they are
# refused, as a//b and a/../b are.
# What is seen: putting an object under a/ or /a replaces the one under a.
# Where it matters: batchyard/storage/cloud_bucket.py refuses such keys itself.
#
# Exits with 0 as long as it is so, and with another status once the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check obstore==0.12.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import obstore
from obstore.store import MemoryStore

seen = {}
for key in ("a/", "/a", "a//b", "a/../b"):
    store = MemoryStore()
    obstore.put(store, "a", b"old")
    try:
        obstore.put(store, key, b"new")
    except ValueError:
        seen[key] = "refused"
    else:
        keys = [each["path"] for page in obstore.list(store) for each in page]
        seen[key] = f"{keys}, and a has {bytes(obstore.get(store, 'a').bytes()).decode()!r}"
    print(f"{key}: {seen[key]}")

replaced = "['a'], and a has 'new'"
expected = {"a/": replaced, "/a": replaced, "a//b": "refused", "a/../b": "refused"}
assert seen == expected, "The behaviour has changed."
PYTHON
