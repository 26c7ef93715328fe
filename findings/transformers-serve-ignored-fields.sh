#!/usr/bin/env bash
# transformers 5.24.0, `POST /v1/chat/completions` of `transformers serve` on a CPU.
# `n`, `logprobs` and `response_format` are taken with 200 and have no effect: there is one choice,
# it has no log probabilities, and its text is not of the schema. A field with a name that it does
# not know, `no_such_field`, is refused with 422.
# Matters for: batchyard/engine/kinds/transformers_serve.py, docs/reference/servers.md
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q --disable-pip-version-check "transformers[serving]==5.24.0" "torch==2.13.0"
cat >"$folder/make.py" <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = [*"abcdefghijklmnopqrstuvwxyz", "<end>", "<none>"]
tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(letters)}, unk_token="<none>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token="<end>",
    unk_token="<none>",
    pad_token="<end>",
    chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
).save_pretrained(sys.argv[1])
config = LlamaConfig(
    vocab_size=len(letters),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    eos_token_id=26,
    pad_token_id=26,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON
"$folder/environment/bin/python" "$folder/make.py" "$folder/tiny"
cat >"$folder/try.py" <<'PYTHON'
import json
import sys
import time
import urllib.error
import urllib.request

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "required": ["a"]}},
}


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        sys.argv[1] + path, data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


for _ in range(600):
    try:
        ask("/health")
        break
    except OSError:
        time.sleep(0.5)
message = {"role": "user", "content": "hello"}
for more in (
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"response_format": SCHEMA},
    {"no_such_field": 1},
):
    body = {"model": sys.argv[2], "messages": [message], "max_tokens": 4, **more}
    status, answer = ask("/v1/chat/completions", body)
    choices = answer["choices"] if answer else []
    has_logprobs = [bool(each.get("logprobs")) for each in choices]
    has_object = [each["message"]["content"].strip().startswith("{") for each in choices]
    print(*more, status, len(choices), has_logprobs, has_object)
PYTHON
cat >"$folder/expected" <<'TEXT'
n 200 1 [False] [False]
logprobs top_logprobs 200 1 [False] [False]
response_format 200 1 [False] [False]
no_such_field 422 0 [] []
TEXT
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
HF_HUB_OFFLINE=1 "$folder/environment/bin/transformers" serve "$folder/tiny" --device cpu \
    --host 127.0.0.1 --port "$port" >"$folder/log" 2>&1 &
server=$!
python3 "$folder/try.py" "http://127.0.0.1:$port" "$folder/tiny" >"$folder/seen" || cat "$folder/log"
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
