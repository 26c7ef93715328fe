"""docs/deploy: what a page states about the code is what the code has."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import yaml
from sqlalchemy import text

from batchyard.engine.vllm.nodes import link
from batchyard.engine.vllm.nodes.link import DEFAULT_PORT
from batchyard.errors import BatchyardError
from batchyard.settings import Settings
from batchyard.settings_sources import OTHER_VARIABLES
from batchyard.store import RunnerKind, open_store, upgrade
from blocks import VllmEngineBlock
from commands.prefect.deploy_file import read_deploy_file
from tests.deploy.tools import ROOT, rendered
from tests.pages import block
from tests.services.postgres import postgres_for_session

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy.ext.asyncio import AsyncConnection

PAGE = "docs/deploy/several-machines.md"
MACHINES = (ROOT / PAGE).read_text()
KUBERNETES = "docs/deploy/kubernetes.md"
NODES = "docs/deploy/several-machines-per-model.md"
CELLS = {"", "same", "own", "deployment"}

# The calls of the S3 client, and the right that each of them needs.
RIGHTS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
}


def test_the_table_of_settings_has_each_of_them_once() -> None:
    table = MACHINES.partition("<!-- settings: begin -->\n")[2].partition("<!-- settings: end")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    names = [row[0].strip("`").lower() for row in rows[2:]]
    assert sorted(names) == sorted(Settings.model_fields)
    for row in rows[2:]:
        assert set(row[1:5]) <= CELLS, row
        assert any(row[1:5]), row
    assert all(f"`{name}`" in MACHINES for name in OTHER_VARIABLES)


def test_the_table_names_who_reads_what_runners_and_plans_need() -> None:
    """Also the command line: `batchyard run` plans and runs in its own process."""
    rows = [line.split("|") for line in MACHINES.splitlines() if line.startswith("| `")]
    readers = {row[1].strip(" `").lower(): [cell.strip() for cell in row[2:6]] for row in rows}
    of_runner, of_plan = (
        read_in("runner/run.py", "runner/chunk/chunk.py"),
        read_in("steps/prepare/prepare.py"),
    )
    assert {"order", "hang_seconds"} <= of_runner
    assert "chunk_requests" in of_plan
    # It has no idle runner: its own ends with the batch.
    of_run = (of_runner | of_plan) - {"runner_idle_seconds"}
    for number, names in ((1, of_plan), (2, of_runner), (3, of_run)):
        assert [name for name in sorted(names) if not readers[name][number]] == []


def read_in(*modules: str) -> set[str]:
    texts = [(ROOT / "batchyard" / each).read_text() for each in modules]
    found = {name for text in texts for name in re.findall(r"settings\.([a-z_]+)", text)}
    return found & Settings.model_fields.keys()


def test_what_the_capacity_rests_on_is_what_was_measured() -> None:
    """Each figure before a link to a section of the benchmarks is there, or among the noise."""
    page = (ROOT / "docs/deploy/production.md").read_text()
    _, *parts = (ROOT / "docs/benchmarks.md").read_text().split("\n## ")
    sections = {
        re.sub(r"[^\w-]", "", part.lower().split("\n")[0].replace(" ", "-")): part for part in parts
    }
    cited = re.findall(r"\| ([^|]*)\(\[[^|\]]*\]\(\.\./benchmarks\.md#([\w-]+)", page)
    assert len(cited) >= 5
    for cell, anchor in cited:
        measured = sections[anchor] + sections["noise"]
        for figure in re.findall(r"\d[\d.,]*\d", cell):
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d,])", measured), (
                figure,
                anchor,
            )


def test_the_policy_for_the_bucket_has_every_right_that_is_used_and_no_other() -> None:
    code = (ROOT / "batchyard/storage/bucket.py").read_text()
    calls = set(re.findall(r'"([a-z0-9_]+)"', code)) & RIGHTS.keys()
    calls |= set(re.findall(r"_client\.([a-z0-9_]+)\(", code)) & RIGHTS.keys()
    other = set(re.findall(r"_client\.([a-z0-9_]+)\(", code)) - RIGHTS.keys()
    assert other == {"close"}
    policy = json.loads(block(PAGE, "policy"))
    allowed = {action for each in policy["Statement"] for action in each["Action"]}
    assert allowed == {RIGHTS[call] for call in calls}


def test_the_lifecycle_rule_deletes_no_object() -> None:
    (rule,) = json.loads(block(PAGE, "lifecycle"))["Rules"]
    assert rule.keys() == {"ID", "Status", "Filter", "AbortIncompleteMultipartUpload"}


async def test_a_process_opens_as_many_connections_as_the_page_says(
    request: pytest.FixtureRequest,
) -> None:
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    most = 0

    async def work(connection: AsyncConnection) -> None:
        nonlocal most
        await connection.execute(text("SELECT pg_sleep(0.05)"))
        count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        found = await connection.execute(text(f"{count} AND application_name LIKE 'batchyard %'"))
        most = max(most, int(found.scalar_one()))

    async with open_store(url, migrate=True) as store:
        await asyncio.gather(*(store.database.read(work) for _ in range(40)))
    (stated,) = re.findall(r"Each process opens up to \*\*(\d+)\*\*", MACHINES)
    assert most == int(stated)


async def test_a_user_who_may_not_change_tables_is_enough_for_all_but_migrate(
    request: pytest.FixtureRequest,
) -> None:
    """The page's SQL, as the owner of the database runs it."""
    sql = block(PAGE, "roles")
    cluster = postgres_for_session(request)
    url = cluster.url(await cluster.create_database())
    connection = await asyncpg.connect(url)
    # The cluster's superuser has the name of the page's user, and roles belong to all databases.
    sql = re.sub(r"\bbatchyard\b", "page_user", sql).replace("batchyard_owner", "page_owner")
    try:
        await connection.execute(sql)
        as_owner, as_user = (
            url.replace("//batchyard@", f"//{role}@") for role in ("page_owner", "page_user")
        )
        with pytest.raises(BatchyardError):
            await upgrade(as_user, patience_seconds=1)
        assert await upgrade(as_owner, patience_seconds=10)
        async with open_store(as_user) as store:
            record = await store.runners.register(kind=RunnerKind.CHUNKS, pool="gpu", model="m")
            await store.runners.retire(record.id)
            assert await store.chunks.demand() == []
    finally:
        for role in ("page_owner", "page_user"):
            await connection.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
        await connection.close()


@pytest.mark.parametrize("index", [0, 1])
def test_the_values_on_the_page_can_be_installed(index: int, tmp_path: Path) -> None:
    """The second block is about the Ingress only, and comes on top of the first."""
    values: dict[str, Any] = {}
    for name in ("values", "ingress")[: index + 1]:
        values |= yaml.safe_load(block(KUBERNETES, name))
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    kinds = {each["kind"] for each in rendered(path)}
    assert ("Ingress" in kinds) is bool(index)


def test_the_model_over_several_machines_on_the_page_can_be_deployed(tmp_path: Path) -> None:
    path = tmp_path / "batchyard.toml"
    path.write_text(block(NODES, "model-of-nodes"))
    (model,) = read_deploy_file(path).models
    assert isinstance(model.block, VllmEngineBlock)
    assert (model.block.nodes, model.pool) == (2, "huge")


def test_the_values_for_nodes_on_the_page_can_be_installed(tmp_path: Path) -> None:
    values = yaml.safe_load(block(KUBERNETES, "values"))
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values | yaml.safe_load(block(NODES, "values-of-nodes"))))
    (group,) = (each for each in rendered(path) if each["kind"] == "LeaderWorkerSet")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_the_page_about_nodes_has_the_ports_and_the_time_of_the_code() -> None:
    page = (ROOT / NODES).read_text()
    assert VllmEngineBlock.model_fields["nodes_port"].default == DEFAULT_PORT
    assert f"`nodes_port`, {DEFAULT_PORT}" in page
    assert (link.ALIVE_SECONDS, link.SILENCE_SECONDS) == (2, 10)
    assert "a sign of life every two seconds" in page
    assert "nothing is heard of it for ten seconds" in page
