"""Runs in the other tools' environment: each with its defaults, on a server.

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
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tool = Callable[[str, str, Sequence[str], dict[str, Any]], list[int]]

LITELLM = "litellm"
DAFT = "daft"
SATURATE = "saturate"
RAY = "ray"
_KEY = "none"


def with_litellm(url: str, model: str, prompts: Sequence[str], wanted: dict[str, Any]) -> list[int]:
    """How many tokens each answer has. ``batch_completion`` has a hundred threads by default."""
    import litellm  # noqa: PLC0415 - the others have nothing of it

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


def with_saturate(
    url: str, model: str, prompts: Sequence[str], wanted: dict[str, Any]
) -> list[int]:
    """Likewise. It keeps the answers in Parquet files, which is part of its time."""
    from saturate import pump, read_output  # noqa: PLC0415 - likewise

    bodies = _bodies(model, prompts, wanted)
    with tempfile.TemporaryDirectory() as output:
        pump(
            [(str(number), {"number": number}) for number in range(len(bodies))],
            to_request=lambda row: bodies[row["number"]],
            parse=lambda _, answer: {"tokens": answer["usage"]["completion_tokens"]},
            endpoint=url,
            output=output,
        )
        answered = {int(name): row["tokens"] for name, row in read_output(output)}
    return [answered.get(number, 0) for number in range(len(bodies))]


def with_ray(url: str, model: str, prompts: Sequence[str], wanted: dict[str, Any]) -> list[int]:
    """Likewise. Ray itself is started for the first file, which is not timed."""
    import ray  # noqa: PLC0415 - likewise
    from ray.data.llm import HttpRequestProcessorConfig, build_processor  # noqa: PLC0415

    bodies = _bodies(model, prompts, wanted)
    processor = build_processor(
        HttpRequestProcessorConfig(url=f"{url}/chat/completions"),
        preprocess=lambda row: {"payload": json.loads(row["body"]), "number": row["number"]},
        postprocess=lambda row: {
            "tokens": row["http_response"]["usage"]["completion_tokens"],
            "number": row["number"],
        },
    )
    rows = [{"number": number, "body": json.dumps(body)} for number, body in enumerate(bodies)]
    answers = processor(ray.data.from_items(rows)).take_all()
    answered = {row["number"]: row["tokens"] for row in answers}
    return [answered.get(number, 0) for number in range(len(bodies))]


def _bodies(model: str, prompts: Sequence[str], wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """The bodies of the requests, for tools that take them as they are."""
    fields = {name: value for name, value in wanted.items() if name != "extra_body"}
    fields |= wanted["extra_body"]
    return [
        {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}
        for prompt in prompts
    ]


TOOLS: dict[str, Tool] = {
    LITELLM: with_litellm,
    DAFT: with_daft,
    SATURATE: with_saturate,
    RAY: with_ray,
}


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
    # One would ask for prices and others tell of their use, on the internet.
    os.environ |= {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    run(json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:])
