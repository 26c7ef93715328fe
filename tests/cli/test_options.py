"""What the values of our own options are made into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer

from batchyard.cli.batches import batch_options
from batchyard.cli.batches.batch_options import parse_metadata, read_chain
from batchyard.cli.tenants import quota
from batchyard.engine.objective import Objective
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.errors import RequestRefused
from batchyard.locations.location import parse_location
from batchyard.settings import read_settings
from commands.engine_choice import EngineChoice, ServerUse
from commands.run import errors_beside

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("results.jsonl", "results.errors.jsonl"),
        ("/data/run.1.jsonl", "/data/run.1.errors.jsonl"),
        ("results", "results.errors.jsonl"),
        ("results.jsonl.gz", "results.errors.jsonl.gz"),
        ("results.zst", "results.errors.jsonl.zst"),
        ("results.parquet", "results.errors.jsonl"),
        ("s3://bucket/results.jsonl", None),
        ("https://host.example/results.jsonl?sig=x", None),
    ],
)
def test_the_error_file_lies_beside_a_local_output(output: str, errors: str | None) -> None:
    """What is remote has none: its file is kept in the object store."""
    beside = errors_beside(parse_location(output))
    assert (beside and str(beside)) == errors


def test_metadata_is_pairs() -> None:
    """The first ``=`` divides; a value may be empty."""
    assert parse_metadata(["team=search", "query=a=b", "note="]) == {
        "team": "search",
        "query": "a=b",
        "note": "",
    }
    assert parse_metadata(None) is None


@pytest.mark.parametrize("pair", ["team", "=search", ""])
def test_metadata_without_a_key_is_refused(pair: str) -> None:
    """The message shows what was written."""
    with pytest.raises(RequestRefused, match=f"--metadata {pair} is not of the form key=value"):
        parse_metadata([pair])


def test_a_file_of_an_option_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """As editors on Windows write it, and as in the input and in `batchyard.toml`."""
    (tmp_path / "rules.json").write_text('{"invalid_json": true}', encoding="utf-8-sig")
    (tmp_path / "judge.json.j2").write_text('{"max_tokens": 8}', encoding="utf-8-sig")
    (tmp_path / "chain.toml").write_text(
        '[[then]]\nendpoint = "/v1/embeddings"\ntemplate_file = "judge.json.j2"\n',
        encoding="utf-8-sig",
    )
    assert batch_options._read_object(f"@{tmp_path}/rules.json") == {"invalid_json": True}
    assert batch_options._read_text(f"{tmp_path}/judge.json.j2") == '{"max_tokens": 8}'
    (stage,) = read_chain(f"{tmp_path}/chain.toml")
    assert stage["template"] == '{"max_tokens": 8}'


@pytest.mark.parametrize("text", ["1_000", "+5", "٣", "9" * 19, "9" * 5_000])
def test_a_limit_that_the_database_does_not_hold_is_refused(text: str) -> None:
    """Python itself refuses to read more than 4,300 digits."""
    with pytest.raises(typer.BadParameter, match="is neither a number nor none"):
        quota._limit("--requests", text)
    assert quota._limit("--requests", f"{2**63 - 1}") == 2**63 - 1


def test_the_model_may_stand_in_the_engines_config_file(tmp_path: Path) -> None:
    """As for ``vllm serve --config``."""
    config = tmp_path / "engine.yaml"
    config.write_text("model: org/weights\nserved-model-name: short\n")
    choice = EngineChoice.of(None, ["--config", str(config)], None)
    assert (choice.weights, choice.models) == ("org/weights", ("short",))


def test_a_server_may_serve_any_model() -> None:
    """Without --model, lines are not held to a name."""
    assert EngineChoice.of(None, [], "http://host.example").models == ()
    assert EngineChoice.of("m", [], "http://host.example").models == ("m",)


def test_a_server_has_the_objective_of_the_command_line() -> None:
    use = ServerUse(seats=64, ttft_ms=250, reserve_seats=10, priority=3)
    engine = EngineChoice.of("m", [], "http://host.example", use=use).make(read_settings(), "m")
    assert isinstance(engine, RemoteEngine)
    assert engine.gate is not None
    assert engine.gate.controller.objective == Objective(0.25, None, 0.99)
    assert (engine.window_size, engine._priority) == (54, 3)


def test_a_server_has_the_adapters_of_the_command_line() -> None:
    """Each stands for the model, and their requests are kept together."""
    use = ServerUse(adapters=("tone", "org/other"))
    choice = EngineChoice.of("m", [], "http://host.example", use=use)
    assert choice.models == ("m", "tone", "org/other")
    assert choice.offer.model_of("tone") == "m"
    assert choice.make(read_settings(), "m").adapters == {"tone", "org/other"}


@pytest.mark.parametrize(
    ("model", "url", "adapters"),
    [
        (None, "http://host.example", ("tone",)),
        ("m", None, ("tone",)),
        ("m", "http://host.example", ("m",)),
        ("m", "http://host.example", ("tone", "tone")),
        ("m", "http://host.example", ("../tone",)),
    ],
    ids=["no model", "no server", "the model", "twice", "a path"],
)
def test_adapters_that_mean_nothing_are_refused(
    model: str | None, url: str | None, adapters: tuple[str, ...]
) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        EngineChoice.of(model, [], url, use=ServerUse(adapters=adapters))
    assert refused.value.param_hint == "--engine-adapter"


@pytest.mark.parametrize(
    ("url", "use"),
    [
        (None, ServerUse(ttft_ms=250)),
        (None, ServerUse(priority=0)),
        ("http://host.example", ServerUse(exclusive=True, itl_ms=50)),
        ("http://host.example", ServerUse(exclusive=True, reserve_seats=2)),
        ("http://host.example", ServerUse(latency_quantile=0.9)),
    ],
)
def test_ways_to_use_a_server_that_contradict_each_other_are_refused(
    url: str | None, use: ServerUse
) -> None:
    with pytest.raises(typer.BadParameter):
        EngineChoice.of("m", [], url, use=use)


def test_client_rules_reach_the_engine(tmp_path: Path) -> None:
    choice = EngineChoice.of(str(tmp_path), [], None, client_rules=True)
    assert choice.client_rules
    assert choice.use == ServerUse()
