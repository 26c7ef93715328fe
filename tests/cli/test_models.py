"""``batchyard models``: what is configured, what serves it, and why nothing does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prefect.settings import temporary_settings

from batchyard.batch.chains import Stage
from batchyard.cli.operate import list_models
from batchyard.store import EngineLoad, LiveEngine, RunnerKind
from blocks.engines import RemoteEngineBlock
from tests.cli.conftest import Ended, with_store
from tests.contract.store.samples import USAGE, begun_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from prefect.settings import Setting

    from batchyard.store import Store

    Run = Callable[..., Ended]


def by_name(ended: Ended) -> dict[str, dict[str, Any]]:
    assert ended.status == 0, ended.stderr
    return {each["name"]: each for each in map(json.loads, ended.stdout.splitlines())}


async def some_work(store: Store) -> None:
    """A model with a loaded engine, one that is being loaded, and three without."""
    for model in ("loaded", "loading", "waiting", "next"):
        await begun_batch(store, model=model)
    for model in ("loaded", "loading"):
        runner = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model=model)
        if model == "loaded":
            await store.runners.ready(runner.id)
            await store.runners.heartbeat(runner.id, load=EngineLoad(cache_used=0.375))
            await store.live_engines.register(
                LiveEngine(runner_id=runner.id, model=model, address="unix:///s", secret="s")
            )
    await store.rates.record("loaded", "gpu", tokens_per_second=1234.0)
    await store.rates.record("idle", "gpu", tokens_per_second=10.0)
    await store.batch_schedule.record_waits({"waiting": "All slots are taken."})


def test_each_model_has_its_engines_or_the_reason_why_there_is_none(alone: Run) -> None:
    with_store(some_work)
    found = by_name(alone("models", "--json"))
    assert {name: each["why_none"] for name, each in found.items()} == {
        "idle": "No batch needs it.",
        "loaded": None,
        "loading": "An engine is loading it, or is about to end.",
        "next": "An engine will be started for it.",
        "waiting": "All slots are taken.",
    }
    assert found["loaded"] == {
        "name": "loaded",
        "adapters": [],
        "pool": "gpu",
        "is_configured": None,
        "engines_ready": 1,
        "engines_loading": 0,
        "engines_draining": 0,
        "engines_live": 1,
        "slots": None,
        "waiting_requests": 10,
        "tokens_per_second": 1234.0,
        "cache_used": 0.375,
        "why_none": None,
    }
    lines = [line.split() for line in alone("models").stdout.splitlines()]
    assert ["loaded", "gpu", "1,", "1", "live", "-", "10", "1,234", "38%"] in lines


def test_without_prefect_it_is_said_what_is_not_known(alone: Run) -> None:
    ended = alone("models")
    assert ended.status == 0
    assert ended.stderr == (
        "batchyard: It is not known which models are configured: PREFECT_API_URL is not set.\n"
    )


async def a_chain_in_its_last_stage(store: Store) -> None:
    chain = await begun_batch(store, model="first", then=(Stage("/v1/embeddings", "{}"),))
    (lease,) = await store.chunks.claim(model="first", owner="r", lease_seconds=60)
    await store.chunks.complete(lease, completed=10, failed=0, usage=USAGE)
    await store.rates.record("first", "gpu", tokens_per_second=10.0)
    await store.batch_schedule.record_wait(chain.id, "The hours of last begin at 22:00.")


def test_a_model_is_not_waited_for_by_a_chain_that_is_past_it(alone: Run) -> None:
    with_store(a_chain_in_its_last_stage)
    found = by_name(alone("models", "--json"))
    assert found["first"]["why_none"] == "No batch needs it."


def test_a_prefect_that_is_away_costs_only_what_it_knows(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with_store(some_work)
    ended = alone("models", "--json")
    assert "loaded" in by_name(ended)
    assert "did not answer" in ended.stderr


def test_models_are_those_of_prefects_engine_blocks(
    here: Run, prefect_settings: dict[Setting, str]
) -> None:
    with temporary_settings(prefect_settings):
        RemoteEngineBlock(model="far", base_url="http://10.0.0.5").save("far", overwrite=True)
    with_store(some_work)
    ended = here("models", "--json")
    found = by_name(ended)
    assert ended.stderr == ""
    assert (found["far"]["is_configured"], found["far"]["slots"]) == (True, 0)
    assert found["far"]["why_none"] == "The work pool gpu does not exist, or its limit is 0."
    assert found["next"]["why_none"] == (
        "No engine block in Prefect names it: `batchyard deploy` makes one."
    )


def test_a_live_model_gets_an_engine_without_any_batch(
    alone: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def configured(*_: object) -> list_models._Configured:
        names = frozenset({"chatty", "idle"})
        live, adapters = frozenset({"chatty"}), {"idle": ("law", "tone")}
        return list_models._Configured(names, {"gpu": 1}, live=live, adapters=adapters)

    monkeypatch.setattr(list_models, "_configured", configured)
    found = by_name(alone("models", "--json"))
    assert {name: each["why_none"] for name, each in found.items()} == {
        "chatty": "An engine will be started for it.",
        "idle": "No batch needs it.",
    }
    assert [found[name]["adapters"] for name in ("chatty", "idle")] == [[], ["law", "tone"]]
    assert "idle + law, tone" in alone("models").stdout
