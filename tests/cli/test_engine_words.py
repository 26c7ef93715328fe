"""Whose words are whose on a command line for ``batchyard run``."""

from __future__ import annotations

import pytest
import typer

from batchyard.cli import make_app
from batchyard.cli.terminal.engine_words import served_names, split_options


def own_options() -> dict[str, bool]:
    """Those of the real command."""
    command = typer.main.get_command(make_app()).commands["run"]
    return command.own_options(command.make_context("run", ["-i", "a", "-o", "b"]))


@pytest.mark.parametrize(
    ("line", "ours", "engine"),
    [
        ("-i a -o b --model m", "-i a -o b --model m", ""),
        ("-i a --seed 1 -o b --enforce-eager", "-i a -o b", "--seed 1 --enforce-eager"),
        ("-ep -i a -tp 2", "-i a", "-ep -tp 2"),
        ("--input_file a --output_file=b", "--input-file a --output-file=b", ""),
        ("-i=a", "-i a", ""),
        ("-i -weird.jsonl", "-i -weird.jsonl", ""),
        ("--compilation-config={} -o b", "-o b", "--compilation-config={}"),
        ("--served-model-name a b --errors e", "--errors e", "--served-model-name a b"),
        ("-o b -- -i --model", "-o b", "-i --model"),
        ("--notify_email a@b.c --webhook-url=u", "--notify-email a@b.c --webhook-url=u", ""),
        ("--deduplicate -i a --seed 1", "--deduplicate -i a", "--seed 1"),
        (
            "--client-rules --seed 1 --no-client-rules",
            "--client-rules --no-client-rules",
            "--seed 1",
        ),
        ("-i", "-i", ""),
        ("-h --help", "-h --help", ""),
    ],
)
def test_words_that_are_not_ours_are_the_engines(line: str, ours: str, engine: str) -> None:
    """In their order, and however they are written."""
    assert split_options(line.split(), own_options()) == (ours.split(), engine.split(), [])


@pytest.mark.parametrize(
    "word", ["--tune", "--kv-offload", "--kv_offload=40", "--speculation", "--speculation=ngram"]
)
def test_an_option_that_was_ours_is_not_vllms(word: str) -> None:
    """vLLM would refuse it after minutes, and not say that it was withdrawn."""
    name = word.partition("=")[0].replace("_", "-")
    with pytest.raises(typer.BadParameter, match=f"^{name} was withdrawn and has no effect"):
        split_options(["--seed", "1", word, "2"], own_options())
    words = ["--seed", "1", "--", word]
    assert split_options(words, own_options()) == ([], ["--seed", "1", word], [])


def test_what_vllm_serve_would_refuse_is_left_out() -> None:
    """Options of ``vllm run-batch`` alone, with their values."""
    words = ["--enable-metrics", "--output_tmp_dir", "/scratch", "--url=0.0.0.0", "--port", "9"]
    words += ["--max-inflight", "512", "--max_inflight=512"]
    assert split_options(words, own_options()) == (
        [],
        ["--port", "9"],
        ["--enable-metrics", "--output-tmp-dir", "--url", "--max-inflight", "--max-inflight"],
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("", ("org/model",)),
        ("--seed 1", ("org/model",)),
        ("--served-model-name a", ("a",)),
        ("--served_model_name=a", ("a",)),
        ("--served-model-name a b --seed 1", ("a", "b")),
        ("--served-model-name a --served-model-name b", ("b",)),
        ("--lora-modules x=path/x y=path/y", ("org/model", "x", "y")),
        ('--lora-modules {"name":"x","path":"p"}', ("org/model", "x")),
        ("--lora-modules {broken", ("org/model",)),
    ],
)
def test_lines_may_name_what_the_engine_serves(options: str, names: tuple[str, ...]) -> None:
    """As ``vllm serve`` reads its options: the last mention holds, adapters have names too."""
    assert served_names("org/model", options.split()) == names
