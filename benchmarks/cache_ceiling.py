"""Runs in the engine environment: the share of prompt tokens that an endless cache would have.

Exact, from the token ids: a cache holds whole blocks, a block is found again if everything before
it is the same too, and the last token of a prompt is always computed. Prints one JSON list, a
share for each file. Arguments: model folder, block size, files of chat requests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def ceiling(tokenizer: Any, file: str, block_size: int) -> float:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    prompt_tokens = cached_tokens = 0
    for line in Path(file).read_text().splitlines():
        messages = json.loads(line)["body"]["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        prompt_tokens += len(tokens)
        parent, is_shared = 0, True
        for end in range(block_size, len(tokens) + 1, block_size):
            block = (parent, tuple(tokens[end - block_size : end]))
            is_shared = is_shared and block in seen
            cached_tokens += block_size * (is_shared and end < len(tokens))
            seen.add(block)
            parent = hash(block)
    return cached_tokens / prompt_tokens


def main() -> None:
    model, block_size, *files = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    shares = [ceiling(tokenizer, file, int(block_size)) for file in files]
    print("RESULT " + json.dumps(shares), flush=True)


if __name__ == "__main__":
    main()
