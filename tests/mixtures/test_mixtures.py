"""Features mixed by a machine: whatever meets, each request has its own answer once.

``python -m tests.mixtures 0 1000`` plays more seeds, and says which pairs of features they met.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.nursery import running_nursery
from tests.mixtures.installation import NURSERY, own_prefix, run_script
from tests.mixtures.script import pairs_of, possible_pairs, script_of, shrunk
from tests.services.postgres import postgres_for_session
from tests.services.swift import BUCKET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from batchyard.storage.bucket import S3Credentials
    from tests.faults.nursery import Nursery
    from tests.mixtures.script import Script


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    async with running_nursery(NURSERY) as started:
        yield started


@pytest.mark.parametrize("seed", range(7))
async def test_whatever_is_mixed_each_request_has_its_own_answer_once(
    seed: int, nursery: Nursery, empty_database: Path, tmp_path: Path
) -> None:
    await run_script(script_of(seed), tmp_path / "it", nursery, empty_database=empty_database)


@pytest.mark.parametrize("seed", range(7, 10))
async def test_the_same_holds_on_postgresql_and_s3(
    seed: int,
    request: pytest.FixtureRequest,
    s3: S3Credentials,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key_id or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_access_key or "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", s3.region or "")
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    # After the variables, which it inherits.
    async with running_nursery(NURSERY) as nursery:
        await run_script(
            script_of(seed),
            tmp_path / "it",
            nursery,
            database_url=url,
            storage=own_prefix(BUCKET),
        )


def test_a_thousand_scripts_mix_every_pair_of_features_ten_times() -> None:
    met = pairs_of(script_of(seed) for seed in range(1000))
    assert {pair: met[pair] for pair in possible_pairs() if met[pair] < 10} == {}


def test_a_script_is_the_same_for_the_same_seed_and_can_be_written_down() -> None:
    script = script_of(3)
    assert json.loads(json.dumps(script)) == script == script_of(3)


async def test_a_failing_script_shrinks_to_what_it_fails_by() -> None:
    script = script_of(12)
    creates = [step for step in script if step["do"] == "create" and step["options"]]
    option = creates[0]["options"][0]

    async def fails(candidate: Script) -> bool:
        options: list[Any] = [step.get("options", []) for step in candidate]
        return any(option in each for each in options)

    (left,) = await shrunk(script, fails, tries=1)
    assert (left["do"], left["options"]) == ("create", [option])
