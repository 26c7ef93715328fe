"""Runs in the other tools' environment: LiteLLM and Daft, with their defaults, on a server.

A job's time runs from the call of the tool to its last answer; the file is read before, and the
results are written after. Each way answers a file once before what is timed, which also imports it.
Prints the seconds of each job. Arguments: a JSON file of jobs (way, file, output), the server's
URL, its model.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tool = Callable[[str, str, Sequence[str], dict[str, Any]], list[int]]

LITELLM = "litellm"
DAFT = "daft"
_KEY = "none"


def with_litellm(url: str, model: str, prompts: Sequence[str], wanted: dict[str, Any]) -> list[int]:
    """How many tokens each answer has. ``batch_completion`` has a hundred threads by default."""
    import litellm  # noqa: PLC0415 - the other one has nothing of it

    answers = litellm.batch_completion(
        model=f"openai/{model}",
        messages=[[{"role": "user", "content": prompt}] for prompt in prompts],
        api_base=url,
        api_key=_KEY,
        **wanted,
    )
    return [answer.usage.completion_tokens for answer in answers]


def with_daft(url: str, model: str, prompts: Sequence[str], wanted: dict[str, Any]) -> list[int]:
    """Likewise; Daft tells the texts only, so an answer counts as what it was asked for."""
    import daft  # noqa: PLC0415 - likewise
    from daft.ai.openai.provider import OpenAIProvider  # noqa: PLC0415
    from daft.functions import prompt  # noqa: PLC0415

    provider = OpenAIProvider(base_url=url, api_key=_KEY)
    frame = daft.from_pydict({"prompt": list(prompts)})
    options = {"use_chat_completions": True, **wanted}
    column = prompt(daft.col("prompt"), provider=provider, model=model, **options)
    texts = frame.with_column("answer", column).to_pydict()["answer"]
    return [wanted["max_tokens"] if text else 0 for text in texts]


TOOLS: dict[str, Tool] = {LITELLM: with_litellm, DAFT: with_daft}


def run(jobs: list[tuple[str, str, str]], url: str, model: str) -> None:
    for way, file, output in jobs:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        prompts = [line["body"]["messages"][0]["content"] for line in lines]
        body = lines[0]["body"]
        wanted = {
            "max_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "extra_body": {"ignore_eos": body["ignore_eos"]},
        }
        _empty_cache(url)
        began = time.perf_counter()
        tokens = TOOLS[way](f"{url}/v1", model, prompts, wanted)
        seconds = time.perf_counter() - began
        # So that no client of a file before is collected while the next one is answered.
        gc.collect()
        _write(output, [line["custom_id"] for line in lines], tokens)
        print(f"SECONDS {seconds}", flush=True)


def _empty_cache(url: str) -> None:
    asked = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")  # noqa: S310 - ours
    while True:
        with urllib.request.urlopen(asked) as answer:  # noqa: S310 - likewise
            # It cannot while the last blocks of the file before are still held.
            if json.load(answer)["success"]:
                return
        time.sleep(0.1)


def _write(output: str, names: Sequence[str], tokens: Sequence[int]) -> None:
    with Path(output).open("w") as results:
        for name, count in zip(names, tokens, strict=True):
            body = {"usage": {"completion_tokens": count, "prompt_tokens": 0}}
            response = {"status_code": 200, "body": body}
            results.write(json.dumps({"custom_id": name, "response": response}) + "\n")


if __name__ == "__main__":
    # One would ask for prices and the other tell of its use, both on the internet.
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    run(json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:])
