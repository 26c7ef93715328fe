"""Which models Prefect's engine blocks offer, and what happens while nobody can say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.cli.batches.prompt_counter import counter_of
from batchyard.dispatch import OfferedModels, block_name
from batchyard.errors import ModelNotFound
from batchyard.lines.endpoints import IN_VLLM
from batchyard.settings import read_settings
from batchyard.steps.create.offered import check_offered
from batchyard.steps.prepare.deep_validation import NoCounter
from tests.api import small_prefect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.api.small_prefect import SmallPrefect


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallPrefect]:
    with small_prefect.serving() as served:
        monkeypatch.setenv("PREFECT_API_URL", served.url)
        yield served


async def test_the_reason_names_the_model_and_the_block_to_make(prefect: SmallPrefect) -> None:
    prefect.models = ["a"]
    why = await OfferedModels().why_not("org/B.1")
    assert why is not None
    assert "org/B.1 is not offered" in str(why)
    assert "block" not in str(why)
    assert f"named {block_name('org/B.1')} " in why.remedy


async def test_the_log_has_the_beginning_of_a_name_that_nobody_offers(
    prefect: SmallPrefect, caplog: pytest.LogCaptureFixture
) -> None:
    """A client writes it: a line may hold one of 32 MiB, and each batch would log it."""
    prefect.models = ["a"]

    async def never(_: str) -> bool:
        return False

    services = SimpleNamespace(
        why_not_offered=OfferedModels().why_not,
        store=SimpleNamespace(rates=SimpleNamespace(knows=never)),
    )
    with pytest.raises(ModelNotFound):
        await check_offered(services, "m" * 100_000)  # type: ignore[arg-type]  # what it uses
    (record,) = (each for each in caplog.records if "model.not_offered" in each.getMessage())
    assert "m" * 100 in record.getMessage()
    assert len(record.getMessage()) < 1000


async def test_prefect_is_asked_again_only_for_what_it_did_not_offer(
    prefect: SmallPrefect,
) -> None:
    prefect.models = ["a"]
    offered = OfferedModels()
    assert [await offered.why_not("a") for _ in range(3)] == [None] * 3
    assert len(prefect.asked) == 1
    assert await offered.why_not("b") is not None
    prefect.models = ["a", "b"]
    assert await offered.why_not("b") is None
    assert len(prefect.asked) == 3


async def test_adapters_are_offered_with_their_models(prefect: SmallPrefect) -> None:
    prefect.models, prefect.remote = ["a", "b"], ["b"]
    prefect.adapters = {"a": ["law"], "b": ["far"]}
    offered = OfferedModels()
    assert (await offered.offer()).adapters == {"law": "a", "far": "b"}
    assert await offered.why_not("law") is None
    assert await offered.endpoints("law") == IN_VLLM
    assert await offered.endpoints("far") is None


async def test_prefect_is_asked_again_for_an_adapter_that_it_did_not_offer(
    prefect: SmallPrefect,
) -> None:
    prefect.models = ["a"]
    offered = OfferedModels()
    assert not (await offered.offer()).has("law")
    prefect.adapters = {"a": ["law"]}
    assert not (await offered.offer()).has("law")
    assert (await offered.offer(["law"])).has("law")
    prefect.status = 500
    assert (await offered.offer(["law"])).has("law")
    assert not (await offered.offer(["none"])).is_known


@pytest.mark.parametrize("status", [404, 401, 500])
async def test_while_prefect_does_not_say_every_model_is_accepted(
    prefect: SmallPrefect, status: int
) -> None:
    """And for some seconds it is not asked again: many batches may be waiting for it."""
    prefect.status = status
    offered = OfferedModels()
    assert [await offered.why_not("a") for _ in range(5)] == [None] * 5
    assert len(prefect.asked) == 1


async def test_without_a_prefect_every_model_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert await OfferedModels().why_not("a") is None


async def test_a_hostile_name_is_shown_short_and_printable(prefect: SmallPrefect) -> None:
    why = await OfferedModels().why_not("\x1b[2J\n" + "x" * 10_000_000)
    assert why is not None
    for words in (str(why), why.remedy):
        assert words.isprintable()
        assert len(words) < 500


async def test_engines_of_ours_serve_what_vllm_has_and_of_other_servers_nothing_is_known(
    prefect: SmallPrefect,
) -> None:
    prefect.models, prefect.remote = ["ours", "theirs"], ["theirs"]
    offered = OfferedModels()
    assert await offered.endpoints("ours") == IN_VLLM
    assert await offered.endpoints("theirs") is None
    assert await offered.endpoints(None) is None
    prefect.remote = []
    assert await offered.endpoints(None) == IN_VLLM
    prefect.models = []
    assert await offered.endpoints(None) is None


async def test_an_estimate_counts_with_what_the_models_block_says(
    prefect: SmallPrefect, tmp_path: Path
) -> None:
    settings = read_settings(home=tmp_path, engine_python=Path(sys.executable))

    async def found(model: str | None, weights: str | None = None) -> Any:
        return await counter_of(settings, model, weights=weights, options="--max-model-len 8")

    prefect.models, prefect.remote = ["a", "b", "c"], ["b"]
    prefect.fields["a"] = {
        "weights": "/models/a",
        "options": "--max-model-len 4k --trust-remote-code",
        "environment": {"HF_HOME": "/data"},
    }
    of_block = await found("a")
    assert (of_block.python, of_block.environment["HF_HOME"]) == (Path(sys.executable), "/data")
    assert of_block.environment["CUDA_VISIBLE_DEVICES"] == ""
    setup = {"model": "/models/a", "max_model_len": 4000, "trust_remote_code": True}
    assert setup.items() <= of_block.setup.items()
    assert (await found("c")).setup["model"] == "c"
    given = await found("a", "/models/given")
    assert (given.setup["model"], given.setup["max_model_len"]) == ("/models/given", 8)
    assert not given.setup["trust_remote_code"]
    assert "a server that runs already" in (await found("b")).why
    assert "there is no block d: name the folder" in (await found("d")).why
    prefect.status = 500
    assert isinstance(await found("a"), NoCounter)
