"""``batchyard deploy`` on a real Prefect server: repeatable, and enough after a wipe."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import urllib3

from tests.pages import block, words_of
from tests.patience import PATIENCE
from tests.services.ports import free_port
from tests.services.prefect import PrefectServer, prefect_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = """
engine_slots = ["0"]

[[models]]
model = "org/Chat-1"
weights = "/data/chat"
adapters = { law = "/data/law" }
options = "--max-model-len 2048"
environment = { HF_HOME = "/data/hub" }

[[models]]
model = "far"
base_url = "http://10.0.0.5:8000/v1"
adapters = ["tone"]
api_key = { variable = "FAR_KEY" }
pool = "remote"

[engines_at_once]
remote = 3

[s3]
endpoint_url = "https://s3.example.org"
secret_access_key = { variable = "S3_SECRET" }
"""
LEFT_OUT = {
    "batch_invariant": False,
    "nodes": 1,
    "nodes_port": 29600,
    "ttft_ms": None,
    "itl_ms": None,
    "latency_quantile": 0.99,
    "reserve_seats": None,
}
LISTS = ("work_pools", "deployments", "block_types", "block_schemas", "block_documents")
# A server whose SQLite is locked for a moment answers 503, and has changed nothing.
BUSY = urllib3.Retry(10, status_forcelist=[503], allowed_methods=None, backoff_factor=0.1)

_MINE = """
import sys
from pathlib import Path

from prefect import flow
from prefect.deployments.runner import RunnerDeployment


@flow(name="mine")
def mine(name: str):
    from helper import WORD

    Path({folder!r}, name).write_text(WORD)


if __name__ == "__main__":
    source = mine.from_source(source={folder!r}, entrypoint="mine.py:mine")
    for name, entrypoint in (("file", "mine.py:mine"), ("module", "mine.mine")):
        made = source.to_deployment(name, work_pool_name="control", parameters=dict(name=name))
        made.entrypoint = entrypoint
        made.apply()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy")
    (folder / "batchyard.toml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PrefectServer]:
    environment = {
        "BATCHYARD_HOME": str(folder / "home"),
        "BATCHYARD_CONFIG": str(folder / "batchyard.toml"),
        "FAR_KEY": "sk-canary",
        "S3_SECRET": "s3-canary",
    }
    with prefect_server(folder, environment) as running:
        yield running


@pytest.fixture(scope="module")
def deployed(server: PrefectServer) -> PrefectServer:
    """A server that has what the file says. Who changes that puts it back."""
    server.run("batchyard", "deploy")
    return server


def ask(server: PrefectServer, path: str, **body: Any) -> Any:
    return send(server, "POST", path, body)


def send(server: PrefectServer, method: str, path: str, body: Any) -> Any:
    answer = urllib3.request(method, f"{server.api_url}/{path}", json=body, retries=BUSY)
    assert answer.status < 300, answer.data
    return json.loads(answer.data or b"null")


def everything(server: PrefectServer) -> dict[str, Any]:
    """All that the server has, with the times at which it was changed."""
    return {name: ask(server, f"{name}/filter") for name in LISTS}


def blocks(server: PrefectServer) -> dict[str, Any]:
    found = ask(server, "block_documents/filter", include_secrets=True)
    return {each["name"]: each["data"] for each in found}


def said_at_start(server: PrefectServer, about: str = "") -> str:
    """What a flow run has said about its database; its log arrives a little after its end."""
    deadline = time.monotonic() + PATIENCE * 30
    while True:
        for entry in ask(server, "logs/filter"):
            if "flow_run.uses" in entry["message"] and about in entry["message"]:
                return str(entry["message"])
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_one_command_makes_what_is_needed(server: PrefectServer) -> None:
    said = server.run("batchyard", "deploy")
    pools = {pool["name"]: pool for pool in ask(server, "work_pools/filter")}
    assert {name: pool["concurrency_limit"] for name, pool in pools.items()} == {
        "control": None,
        "gpu": 1,
        "remote": 3,
    }
    assert {pool["type"] for pool in pools.values()} == {"process"}
    assert blocks(server)["org-chat-1"] == {
        "model": "org/Chat-1",
        "weights": "/data/chat",
        "options": "--max-model-len 2048",
        "environment": {"HF_HOME": "/data/hub"},
        "adapters": {"law": "/data/law"},
        "batch_hours": [],
        "live": False,
        **LEFT_OUT,
    }
    assert blocks(server)["far"]["api_key"] == "sk-canary"
    assert blocks(server)["far"]["adapters"] == ["tone"]
    assert blocks(server)["default"]["secret_access_key"] == "s3-canary"
    assert "canary" not in said
    assert said.splitlines()[-8:] == [
        "deployment submit-batch/default written",
        "deployment submit-new-files/default written",
        "deployment process-batch/default written",
        "deployment run-batches/default written",
        "deployment run-chunks/gpu written",
        "deployment run-chunks/remote written",
        "deployment reconcile/default written",
        "deployment expire-files/default written",
    ]


def test_each_pool_has_its_deployment_and_control_knows_the_pools_of_models(
    deployed: PrefectServer,
) -> None:
    found = ask(deployed, "deployments/filter")
    variables = {each["work_pool_name"]: each["job_variables"]["env"] for each in found}
    assert variables["remote"]["BATCHYARD_POOL"] == "remote"
    assert variables["gpu"]["BATCHYARD_POOL"] == "gpu"
    assert json.loads(variables["control"]["BATCHYARD_POOLS"]) == {"far": "remote"}


def test_a_second_time_changes_nothing(deployed: PrefectServer) -> None:
    before = everything(deployed)
    assert deployed.run("batchyard", "deploy").splitlines()[-1] == "Everything is up to date."
    assert everything(deployed) == before


def test_a_change_of_a_models_options_changes_its_block_only(
    deployed: PrefectServer, folder: Path
) -> None:
    changed = folder / "changed.toml"
    changed.write_text(FILE.replace("2048", "4096"))
    said = deployed.run("batchyard", "deploy", str(changed)).splitlines()
    assert said[2:] == ["block batchyard-vllm-engine/org-chat-1 written"]
    assert blocks(deployed)["org-chat-1"]["options"] == "--max-model-len 4096"
    deployed.run("batchyard", "deploy")


def test_what_somebody_changed_on_the_server_is_as_the_file_says_again(
    deployed: PrefectServer,
) -> None:
    deployed.run("prefect", "work-pool", "set-concurrency-limit", "remote", "9")
    deployed.run("prefect", "work-pool", "set-concurrency-limit", "gpu", "9")
    deployed.run("prefect", "deployment", "schedule", "clear", "--accept-yes", "reconcile/default")
    said = deployed.run("batchyard", "deploy").splitlines()
    assert said[2:] == [
        "pool remote changed, engines at once: 3",  # the file says nothing about `gpu`
        "deployment reconcile/default written",
    ]


def test_a_users_schedule_stays_when_its_deployment_is_written_again(
    deployed: PrefectServer,
) -> None:
    """As after an upgrade."""

    def found() -> Any:
        return send(deployed, "GET", "deployments/name/submit-new-files/default", None)

    path = f"deployments/{found()['id']}"
    (made,) = send(deployed, "POST", f"{path}/schedules", [{"schedule": {"interval": 300}}])
    send(deployed, "PATCH", path, {"version": "an older one"})
    said = deployed.run("batchyard", "deploy").splitlines()
    assert said[2:] == ["deployment submit-new-files/default written"]
    assert [each["schedule"]["interval"] for each in found()["schedules"]] == [300]
    send(deployed, "DELETE", f"{path}/schedules/{made['id']}", None)


def test_a_model_that_is_served_elsewhere_has_one_block(
    deployed: PrefectServer, folder: Path
) -> None:
    """Of two, the runner would take the old one."""
    moved = folder / "moved.toml"
    moved.write_text('[[models]]\nmodel = "org/Chat-1"\nbase_url = "http://10.0.0.6/v1"\n')
    said = deployed.run("batchyard", "deploy", str(moved))
    assert "block batchyard-remote-engine/org-chat-1 written" in said
    assert "block batchyard-vllm-engine/org-chat-1 deleted" in said
    assert "block batchyard-remote-engine/far is not in the file; --prune deletes it" in said
    deployed.run("batchyard", "deploy", "--prune")
    assert sorted(blocks(deployed)) == ["default", "far", "org-chat-1"]
    assert blocks(deployed)["org-chat-1"]["weights"] == "/data/chat"


def test_a_pool_of_slurm_has_the_options_of_the_file(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text(FILE + '[slurm.cluster]\npartition = "a100"\n')
    assert "pool cluster created, engines at once: 1" in deployed.run(
        "batchyard", "deploy", str(file)
    )
    again = deployed.run("batchyard", "deploy", str(file)).splitlines()
    assert again[-1] == "Everything is up to date."
    file.write_text(file.read_text().replace("a100", "h100"))
    said = deployed.run("batchyard", "deploy", str(file)).splitlines()
    assert said[2:] == ["pool cluster changed, the options of its jobs"]
    pool = send(deployed, "GET", "work_pools/cluster", None)
    partition = pool["base_job_template"]["variables"]["properties"]["partition"]
    assert (pool["type"], partition["default"]) == ("slurm", "h100")
    file.write_text(FILE + "[slurm.gpu]\n")
    with pytest.raises(RuntimeError, match="The work pool gpu has the type process"):
        deployed.run("batchyard", "deploy", str(file))
    send(deployed, "DELETE", "work_pools/cluster", None)


def test_a_wiped_server_is_as_before_after_one_command(deployed: PrefectServer) -> None:
    """Also blocks with secrets, and before deployments: a deployment starts runs at once."""
    before = blocks(deployed)
    deployed.stop("server")
    deployed.lose_database()
    deployed.start_server()
    assert ask(deployed, "work_pools/filter") == []
    said = deployed.run("batchyard", "deploy")
    assert blocks(deployed) == before
    assert said.rindex("block ") < said.index("deployment ")
    assert len(ask(deployed, "deployments/filter")) == 8


def run_a_flow_on(
    server: PrefectServer,
    folder: Path,
    worker: list[str],
    *,
    cwd: Path | None = None,
    **environment: str,
) -> None:
    """Run a flow on this worker, whose home is ``folder``; its output is in ``folder/log``."""
    ours = {n: v for n, v in server.environment.items() if not n.startswith("BATCHYARD_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            worker,
            cwd=cwd,
            env=ours | {"HOME": str(folder)} | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        server.run("prefect", "deployment", "run", "expire-files/default", "--watch")
    finally:
        process.terminate()
        process.wait(PATIENCE * 30)


def test_a_flow_run_reads_the_settings_of_the_folder_where_its_worker_was_started(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    """Prefect gives flow runs a temporary folder; they must not use a database of their own."""
    (tmp_path / "batchyard.toml").write_text(f'home = "{tmp_path}/elsewhere"\n')
    words = 'exec "$0" -m prefect worker start --pool control --type process'
    run_a_flow_on(deployed, tmp_path, ["bash", "-c", f"cd {tmp_path} && {words}", sys.executable])
    assert (tmp_path / "elsewhere" / "batchyard.db").is_file()
    assert not (tmp_path / ".batchyard").exists()
    assert f"settings='{tmp_path}/batchyard.toml'" in said_at_start(deployed)


@pytest.mark.parametrize("home", ["{}/elsewhere", "elsewhere"])
def test_a_worker_of_ours_says_what_it_uses_and_runs_flows(
    home: str, deployed: PrefectServer, tmp_path: Path
) -> None:
    """From a folder that Prefect's own command would not tell its flow runs of."""
    (tmp_path / "batchyard.toml").write_text(f'home = "{home.format(tmp_path)}"\n')
    worker = deployed.command("batchyard", "worker", "control")
    run_a_flow_on(deployed, tmp_path, worker, cwd=tmp_path, PWD="/")
    said = (tmp_path / "log").read_text()
    assert f"Database: sqlite:///{tmp_path}/elsewhere/batchyard.db\n" in said
    assert f"Settings: {tmp_path}/batchyard.toml\n" in said
    assert said_at_start(deployed, about=f"sqlite:///{tmp_path}/elsewhere/batchyard.db")
    assert not (tmp_path / ".batchyard").exists()


def test_a_worker_of_ours_finds_the_flows_of_users(deployed: PrefectServer, tmp_path: Path) -> None:
    """By file and by module, as Prefect's own; neither is in the folder of the worker."""
    (tmp_path / "mine.py").write_text(_MINE.format(folder=str(tmp_path)))
    (tmp_path / "helper.py").write_text("WORD = 'found'\n")
    deployed.run("python", str(tmp_path / "mine.py"))
    deployed.start_our_worker("control")
    try:
        for entrypoint in ("file", "module"):
            deployed.run("prefect", "deployment", "run", f"mine/{entrypoint}", "--watch")
            assert (tmp_path / entrypoint).read_text() == "found"
    finally:
        deployed.stop("control")


def test_a_worker_waits_for_prefect_and_for_its_pool_and_then_says_that_it_is_healthy(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    """Processes start in any order; each reason is said once."""
    port = free_port()
    health = f"http://127.0.0.1:{port}/health"
    log = tmp_path / "log"

    def until(what: str) -> None:
        deadline = time.monotonic() + PATIENCE * 60
        while what not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    deployed.stop("server")
    words = ("batchyard", "worker", "late", "--health-port", str(port))
    with log.open("wb") as output:
        process = subprocess.Popen(
            deployed.command(*words),
            env=deployed.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until("did not answer: ")
        deployed.start_server()
        until("batchyard: Prefect has no work pool late: run `batchyard deploy`. Waiting for it.\n")
        deployed.run("prefect", "work-pool", "create", "late", "--type", "process")
        until("started!")
        with urllib.request.urlopen(health, timeout=10) as answer:
            assert answer.status == 200
        assert log.read_text().count("has no work pool") == 1
    finally:
        process.terminate()
        process.wait(PATIENCE * 30)
        if not deployed.is_running("server"):
            deployed.start_server()
        deployed.run("prefect", "--no-prompt", "work-pool", "delete", "late")


def test_doctor_says_that_a_deployment_is_missing_and_what_to_do(deployed: PrefectServer) -> None:
    said = deployed.run("batchyard", "doctor", "control")
    assert "ok       models    far + tone, org/Chat-1 + law\n" in said
    assert "ok       Prefect   has the deployment run-chunks/gpu\n" in said
    deployed.run("prefect", "deployment", "delete", "run-batches/default")
    with pytest.raises(RuntimeError, match=r"FAILED +Prefect .* run `batchyard deploy`"):
        deployed.run("batchyard", "doctor", "control")
    deployed.run("batchyard", "deploy")


def test_it_waits_for_a_server_that_is_not_there_yet(server: PrefectServer) -> None:
    server.stop("server")
    try:
        with pytest.raises(RuntimeError, match="does not answer"):
            server.run("batchyard", "deploy", "--wait", "0")
    finally:
        server.start_server()
    server.run("batchyard", "deploy")


def test_the_file_of_the_page_is_deployed(server: PrefectServer, tmp_path: Path) -> None:
    """docs/how-to/run-from-prefect.md: its file of models, written by a shell, and its command."""
    text = block("docs/how-to/run-from-prefect.md", "models")
    writing, _, command = text.rpartition("EOF\n")
    subprocess.run(["bash", "-e", "-c", f"{writing}EOF\n"], cwd=tmp_path, check=True)
    words = words_of(command)
    assert words == ["deploy", "models.toml"]
    server.run("batchyard", "deploy", str(tmp_path / "models.toml"))
    assert blocks(server)["tiny-chat"] == {
        "model": "tiny-chat",
        "weights": f"{tmp_path}/.models/tiny-chat",
        "options": "--max-model-len 2048",
        "environment": {},
        "adapters": {},
        "batch_hours": [],
        "live": False,
        **LEFT_OUT,
    }
