#!/usr/bin/env bash
# infinity-emb 0.0.78, `POST /embeddings` of `infinity_emb v2` with its torch engine on a CPU.
# `usage.prompt_tokens` is the number of characters: 15 for a text of three words, which are five
# tokens with the two that mark its ends. A text of 3,000 words, for a model that reads 512 tokens,
# is answered 200 as well: with the embedding of its beginning, and a usage of 14,999.
# Matters for: batchyard/engine/kinds/infinity.py, docs/reference/servers.md
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install -q --disable-pip-version-check "infinity-emb[server,torch]==0.0.78" "torch==2.13.0"
cat >"$folder/make.py" <<'PYTHON'
import sys

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, BertTokenizerFast

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "you", "there", "word"]
tokenizer = Tokenizer(models.WordPiece({w: n for n, w in enumerate(words)}, unk_token="[UNK]"))
tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=512).save_pretrained(sys.argv[1])
config = BertConfig(
    vocab_size=len(words),
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=64,
)
BertModel(config).save_pretrained(sys.argv[1])
PYTHON
"$folder/environment/bin/python" "$folder/make.py" "$folder/tiny"
cat >"$folder/try.py" <<'PYTHON'
import json
import sys
import time
import urllib.request


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        sys.argv[1] + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.status, json.load(answer)


for _ in range(600):
    try:
        ask("/models")
        break
    except OSError:
        time.sleep(0.5)
for text in ("hello you there", " ".join(["word"] * 3000)):
    status, answer = ask("/embeddings", {"model": "tiny", "input": text})
    print(status, len(text), answer["usage"]["prompt_tokens"])
PYTHON
cat >"$folder/expected" <<'TEXT'
200 15 15
200 14999 14999
TEXT
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 "$folder/environment/bin/infinity_emb" v2 --model-id "$folder/tiny" \
    --served-model-name tiny --engine torch --device cpu --no-bettertransformer \
    --no-model-warmup --host 127.0.0.1 --port "$port" >"$folder/log" 2>&1 &
server=$!
python3 "$folder/try.py" "http://127.0.0.1:$port" >"$folder/seen" || cat "$folder/log"
diff "$folder/expected" "$folder/seen" && cat "$folder/seen"
