"""What a how-to says to run, run as it stands there: programs, commands, settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.services.up import ROOT, Yard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import openai

WAIT_SECONDS = 600.0
"""The first batch waits for the engine, which takes its time where two cores do much else."""


def exported(block: str) -> dict[str, str]:
    """The variables that the block sets."""
    lines = _run(["bash", "-e", "-c", f"{block}\nenv -0"], cwd=ROOT, environment={}).split("\0")
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    return {name: pairs[name] for name in re.findall(r"^export (\w+)=", block, re.MULTILINE)}


def run_python(program: str, cwd: Path, environment: Mapping[str, str]) -> str:
    """What the program prints."""
    return _run([sys.executable, "-c", program], cwd=cwd, environment=environment)


def bash(command: str, cwd: Path, environment: Mapping[str, str]) -> str:
    """What the commands print."""
    return _run(["bash", "-e", "-c", command], cwd=cwd, environment=environment)


def shown(command: str, cwd: Path, yard: Yard) -> dict[str, Any]:
    """The JSON object that a client's command gets."""
    answer: dict[str, Any] = json.loads(bash(command, cwd, yard.client_environment()))
    return answer


def batch_of(client: openai.OpenAI, path: Path) -> str:
    """A batch of the requests in the file, for the chat endpoint; its id."""
    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def custom_ids(text: str) -> list[str]:
    """Of the lines of a result file among the others; each was answered."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"id"')]
    assert all(line["response"]["status_code"] == 200 for line in lines)
    return [line["custom_id"] for line in lines]


def _run(words: list[str], *, cwd: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
