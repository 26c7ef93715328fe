"""Runs in the engine environment: which vLLM and GPU there is, and how long a file's prompts are.

Prints one JSON object: ``vllm``, ``torch``, ``device`` (null without a GPU), ``tokens`` (mean of
the prompts). Arguments: model folder, a file of chat requests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer
from vllm.version import __version__


def main() -> None:
    model, file = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    texts = (
        tokenizer.apply_chat_template(
            line["body"]["messages"], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    )
    tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {
        "vllm": __version__,
        "torch": torch.__version__,
        "device": device,
        "tokens": tokens / len(lines),
    }
    print("RESULT " + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
