#!/usr/bin/env bash
# huggingface_hub 2.4.0: a file that the repository's .gitignore excludes is left out of a commit.
#
# One would guess: create_commit or upload_file raises an error, or at least makes no commit.
# What is seen: it posts a commit without any file, and returns as after a success.
# Where it matters: batchyard/storage/hub_repository.py looks the file up in the commit afterwards.
#
# The server here says shouldIgnore, as the hub does for such a path. Exits with 0 as long as it is
# so, and with another status once the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0
cd "$folder"
HF_HOME="$folder" HF_HUB_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from huggingface_hub import HfApi

posted = []


class Hub(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/preupload/" in self.path:
            path = json.loads(body)["files"][0]["path"]
            file = {"path": path, "uploadMode": "regular", "shouldIgnore": True}
            answer = {"files": [file]}
        else:
            posted.extend(json.loads(line)["key"] for line in body.splitlines())
            url = f"http://127.0.0.1:{self.server.server_port}/datasets/me/mine/commit/"
            answer = {"commitUrl": url + "a" * 40, "commitOid": "a" * 40}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
api = HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_x")
made = api.upload_file(
    path_or_fileobj=b"{}\n", path_in_repo="a.jsonl", repo_id="me/mine", repo_type="dataset"
)
print(f"the commit has {posted}, and upload_file returned {made.oid[:7]}")
assert posted == ["header"], "The behaviour has changed."
assert made.oid == "a" * 40, "The behaviour has changed."
PYTHON
