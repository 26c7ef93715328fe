"""Engine blocks: from what an operator has saved to the engine of a runner, or to what is wrong."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest
from prefect import get_client
from prefect.client.schemas.actions import BlockDocumentUpdate
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

from batchyard.dispatch import PrefectApi, block_name
from batchyard.engine.base import LivePromise
from batchyard.engine.objective import Objective
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.vllm.nodes.node import Node
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.errors import ModelNotFound, SettingsError
from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow
from batchyard.services.machine.secret_key import read_secret_keys
from batchyard.settings import Settings, read_settings
from blocks import (
    GoogleCredentialsBlock,
    RemoteEngineBlock,
    S3CredentialsBlock,
    VllmEngineBlock,
)
from flows.process.worker import engine_from_block, hours_from_block
from tests.pages import block
from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings(home=tmp_path / "home", engine_python=sys.executable)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("tiny-chat", "tiny-chat"),
        ("org/Model-3.1-8B", "org-model-3-1-8b"),
        ("/models/Llama_3/", "models-llama-3"),
    ],
)
def test_a_block_is_named_after_its_model(model: str, name: str) -> None:
    assert block_name(model) == name


async def test_a_vllm_block_makes_an_engine_with_its_options(settings: Settings) -> None:
    block = VllmEngineBlock(model="org/M.1", options="--max-num-seqs 7 --seed '1'")
    await block.save("org-m-1")
    engine = await engine_from_block(settings, "org/M.1")
    assert isinstance(engine, VllmEngine)
    assert engine.max_num_seqs == 7


async def test_the_nodes_of_a_block_join_with_the_key_of_the_installation(
    settings: Settings, tmp_path: Path
) -> None:
    port = free_port()
    block = VllmEngineBlock(model="wide", options="-dp 2", nodes=2, nodes_port=port)
    await block.save("wide")
    engine = await engine_from_block(settings, "wide")
    assert isinstance(engine, VllmEngine)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    keys = read_secret_keys(settings)
    node = Node("127.0.0.1", port, secret_keys=keys, python=python, log_path=tmp_path / "log")
    joining = asyncio.create_task(node.run())
    await engine._nodes.gather(None, PATIENCE * 10, lambda _: None)
    joining.cancel()
    await asyncio.wait([joining])
    await engine._nodes.close()


def test_a_block_whose_options_do_not_suit_its_nodes_is_refused() -> None:
    with pytest.raises(ValidationError, match="a multiple of 2 ranks, but the options have 1"):
        VllmEngineBlock(model="wide", nodes=2)


async def test_a_stored_block_that_asks_for_what_was_withdrawn_makes_an_engine_and_says_so(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """As an older version has saved it. Values that ask for nothing are not mentioned."""
    of_older = {
        "older": {"tune": True, "kv_offload": 40.0, "speculation": "ngram"},
        "plain": {"tune": False, "kv_offload": 0.0, "speculation": "none"},
    }
    async with get_client() as client:
        for name, fields in of_older.items():
            document_id = await VllmEngineBlock(model=name).save(name)
            saved = BlockDocumentUpdate(data={"model": name, **fields})
            await client.update_block_document(document_id, saved)
    for name in of_older:
        assert isinstance(await engine_from_block(settings, name), VllmEngine)
    said = [each.message for each in caplog.records if "engine.option_withdrawn" in each.message]
    assert len(said) == 3
    for name, message in zip(("tune", "kv_offload", "speculation"), said, strict=True):
        assert f"{name} was withdrawn and has no effect" in message
        assert "model=older" in message


async def test_an_engine_of_a_block_serves_clients_and_fetches_from_where_they_may_name(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    await VllmEngineBlock(model="org/M.2").save("org-m-2")
    for domains in ([], ["media.example.org"]):
        settings.bodies.media_domains = domains
        engine = await engine_from_block(settings, "org/M.2")
        assert isinstance(engine, VllmEngine)
        words = engine._command(tmp_path)
        allowed = words[words.index("--allowed-media-domains") + 1]
        assert allowed == (domains or ["none.invalid"])[0]
        assert engine._environment(tmp_path)["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


async def test_a_remote_block_makes_a_client_that_does_not_show_its_key(settings: Settings) -> None:
    block = RemoteEngineBlock(model="far", base_url="http://10.0.0.5:8000/v1", api_key="sk-canary")
    await block.save("far")
    engine = await engine_from_block(settings, "far")
    assert isinstance(engine, RemoteEngine)
    assert "sk-canary" not in repr(block) + repr(engine)


async def test_a_remote_block_has_an_objective_for_the_servers_users(settings: Settings) -> None:
    block = RemoteEngineBlock(
        model="live",
        base_url="http://10.0.0.5",
        max_num_seqs=64,
        ttft_ms=250,
        itl_ms=50,
        latency_quantile=0.95,
        reserve_seats=10,
        priority=5,
    )
    await block.save("live")
    engine = await engine_from_block(settings, "live")
    assert isinstance(engine, RemoteEngine)
    assert engine.gate is not None
    assert engine.gate.controller.objective == Objective(0.25, 0.05, 0.95)
    assert engine.window_size == 54
    assert engine._priority == 5


async def test_a_live_engine_has_an_objective_for_its_users(
    settings: Settings, tmp_path: Path
) -> None:
    fields = {"ttft_ms": 250, "itl_ms": 50, "latency_quantile": 0.95, "reserve_seats": 10}
    await VllmEngineBlock(model="ours", weights=str(tmp_path), live=True, **fields).save("ours")
    engine = await engine_from_block(settings, "ours")
    assert isinstance(engine, VllmEngine)
    assert engine.promise == LivePromise(Objective(0.25, 0.05, 0.95), 10)


@pytest.mark.parametrize("field", ["ttft_ms", "itl_ms", "reserve_seats"])
def test_an_engine_without_live_users_promises_them_nothing(field: str) -> None:
    with pytest.raises(ValidationError, match="for engines that are live"):
        VllmEngineBlock(model="m", **{field: 100})


@pytest.mark.parametrize(
    "fields",
    [
        {"exclusive": True, "ttft_ms": 100},
        {"exclusive": True, "reserve_seats": 1},
        {"max_num_seqs": 8, "reserve_seats": 8},
        {"ttft_ms": 0},
        {"itl_ms": float("inf")},
        {"ttft_ms": 100, "latency_quantile": 1},
        {"priority": 2**63},
    ],
)
def test_a_remote_block_that_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RemoteEngineBlock(model="m", base_url="http://10.0.0.5", **fields)


def test_a_remote_block_with_the_url_of_an_endpoint_is_refused_with_its_base() -> None:
    with pytest.raises(ValidationError, match="ends in an endpoint: use http://h/v1,"):
        RemoteEngineBlock(model="m", base_url="http://h/v1/chat/completions")


@pytest.mark.parametrize("kind", [VllmEngineBlock, RemoteEngineBlock])
async def test_a_block_has_the_hours_of_its_engine_for_runners_and_the_scheduler(
    kind: type[VllmEngineBlock | RemoteEngineBlock],
) -> None:
    """From the form as from Python, over Prefect's server."""
    window = {"cron": "0 20 * * 1-5", "until": "06:00", "timezone": "Europe/Berlin"}
    fields: dict[str, Any] = {"base_url": "http://10.0.0.5/v1"} if kind is RemoteEngineBlock else {}
    name = f"hours-{kind.__name__.lower()}"
    await kind(model=name, batch_hours=[window], **fields).save(name)
    wanted = Hours((HoursWindow(**window),))
    assert await hours_from_block(name) == wanted
    async with PrefectApi(str(PREFECT_API_URL.value())) as api:
        [offered] = [each for each in await api.offered_models() if each.name == name]
    assert offered.hours == wanted
    await kind(model=name, **fields).save(name, overwrite=True)
    assert await hours_from_block(name) == ALWAYS


async def test_of_two_blocks_for_a_model_the_hours_are_those_of_the_one_that_is_used() -> None:
    remote = RemoteEngineBlock(
        model="twice", base_url="http://h/v1", batch_hours=[{"cron": "0 1 * * *", "duration": "1h"}]
    )
    await remote.save("twice")
    vllm = VllmEngineBlock(model="twice", batch_hours=[{"cron": "0 2 * * *", "duration": "1h"}])
    await vllm.save("twice")
    async with PrefectApi(str(PREFECT_API_URL.value())) as api:
        [offered] = [each for each in await api.offered_models() if each.name == "twice"]
    assert offered.hours == vllm.hours == await hours_from_block("twice")


@pytest.mark.parametrize(
    "window",
    [
        {"cron": "0 20 * *", "duration": "1h"},
        {"cron": "0 20 * * *", "duration": "1h", "timezone": "Berlin"},
        {"cron": "0 20 * * *", "duraton": "1h"},
        {"duration": "1h"},
    ],
)
def test_hours_that_mean_nothing_are_refused_as_the_block_is_made(window: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        VllmEngineBlock(model="m", batch_hours=[window])


async def test_without_a_block_the_remedy_says_which_to_make(settings: Settings) -> None:
    with pytest.raises(ModelNotFound, match="No engine is set up for the model") as caught:
        await engine_from_block(settings, "org/None")
    assert "create a block named org-none" in caught.value.remedy


async def test_a_block_for_another_model_of_the_same_slug_is_refused(settings: Settings) -> None:
    """Its engine would refuse every request."""
    await RemoteEngineBlock(model="a.b", base_url="http://10.0.0.5").save("a-b")
    with pytest.raises(SettingsError, match=r"serves the model a\.b, but the requests name a/b"):
        await engine_from_block(settings, "a/b")


async def test_weights_that_are_not_there_are_named(settings: Settings) -> None:
    await VllmEngineBlock(model="gone", weights="/nowhere/gone").save("gone")
    with pytest.raises(SettingsError, match="weights at /nowhere/gone"):
        await engine_from_block(settings, "gone")


async def test_an_adapter_that_is_not_there_is_named(settings: Settings, tmp_path: Path) -> None:
    """As weights are: another machine may have it, and batches wait for that."""
    await VllmEngineBlock(model="base", adapters={"law": "/nowhere/law"}).save("base")
    with pytest.raises(SettingsError, match=r"block base .* adapter law .* at /nowhere/law, which"):
        await engine_from_block(settings, "base")
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    block = VllmEngineBlock(model="base", adapters={"law": str(tmp_path)})
    await block.save("base", overwrite=True)
    engine = await engine_from_block(settings, "base")
    assert engine.adapters == {"law"}


async def test_a_block_with_fields_of_another_version_is_named(settings: Settings) -> None:
    block = VllmEngineBlock(model="old")
    document_id = await block.save("old")
    async with get_client() as client:
        changed = BlockDocumentUpdate(data={"options": ["--max-num-seqs", "7"]})
        await client.update_block_document(document_id, changed)
    with pytest.raises(SettingsError, match=r"batchyard-vllm-engine/old .* save it again"):
        await engine_from_block(settings, "old")


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("vllm", "qwen-qwen3-8b"),
        ("remote", "qwen-qwen3-8b"),
        ("objective", "qwen-qwen3-8b"),
        ("adapters", "qwen-qwen3-8b"),
        ("hours", "qwen-qwen3-8b"),
        ("s3", "default"),
        ("clouds", "default"),
    ],
)
def test_the_programs_of_the_page_save_blocks(name: str, saved: str) -> None:
    """docs/how-to/configure-engines.md: what each gives to Python, and the block that it names."""
    text = block("docs/how-to/configure-engines.md", name)
    program, _, rest = text.removeprefix("python - <<'EOF'\n").partition("EOF\n")
    exec(program, {})  # noqa: S102 - it is the page's
    kinds = {
        "remote": RemoteEngineBlock,
        "objective": RemoteEngineBlock,
        "s3": S3CredentialsBlock,
        "clouds": GoogleCredentialsBlock,
    }
    kind = kinds.get(name, VllmEngineBlock)
    assert kind.load(saved)
    if rest:
        assert rest == f"prefect block inspect {kind.get_block_type_slug()}/{saved}\n"


def test_options_that_no_shell_would_take_are_refused() -> None:
    with pytest.raises(ValidationError, match="No closing quotation"):
        VllmEngineBlock(model="m", options="--override '{")
