"""An engine over several machines: who joins, what each runs, and that all end with each of them.

The machines are processes of this one, and a stand-in takes vLLM's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.vllm.nodes import link, node
from batchyard.engine.vllm.nodes.leader import Nodes
from batchyard.engine.vllm.nodes.link import LinkLost, WrongKey, link_keys, linked
from batchyard.engine.vllm.nodes.node import Node
from batchyard.engine.vllm.nodes.orders import check_nodes
from batchyard.engine.vllm.vllm_options import CPU, DeviceProfile, EngineOptions
from batchyard.errors import EngineLost, EngineNotReached, EngineStartFailed
from batchyard.store import new_sealing_key
from tests.patience import PATIENCE
from tests.services.ports import free_port
from tests.unit.engine.test_vllm_life import ask, own_engine, session_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from batchyard.engine.vllm.vllm import VllmEngine

    MakeEngine = Callable[..., VllmEngine]

KEY = new_sealing_key()


@dataclass
class Site:
    """A port of the leader, and the machines that join there."""

    folder: Path
    python: Path
    port: int = field(default_factory=free_port)
    said: list[str] = field(default_factory=list)

    def nodes(self, count: int) -> Nodes:
        return Nodes(count, port=self.port, secret_keys=[KEY])

    def node(self, name: str, *, key: str = KEY) -> Node:
        return Node(
            "127.0.0.1",
            self.port,
            secret_keys=[key],
            python=self.python,
            log_path=self.folder / f"{name}.log",
            say=self.said.append,
        )

    @asynccontextmanager
    async def joining(self, *names: str) -> AsyncIterator[list[asyncio.Task[None]]]:
        tasks = [asyncio.create_task(self.node(name).run()) for name in names]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def processes(self) -> list[int]:
        """Those of vLLM on nodes, by the seed that their engine has."""
        return [
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if {b"--headless", b"%d" % self.port} <= set(command_line(folder))
        ]

    async def log(self, name: str, pattern: str) -> re.Match[str]:
        """The first match in the log of that node, as soon as it is there."""
        path = self.folder / f"{name}.log"
        async with asyncio.timeout(PATIENCE * 10):
            while not (path.exists() and (found := re.search(pattern, path.read_text()))):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return found

    async def hears(self, words: str) -> None:
        async with asyncio.timeout(PATIENCE * 10):
            while not any(words in each for each in self.said):  # noqa: ASYNC110 - a node's words
                await asyncio.sleep(0.02)


@pytest.fixture
def site(tmp_path: Path, fake_python: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(node, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(node, "_LONGEST_PAUSE_SECONDS", 0.1)
    return Site(tmp_path, fake_python)


async def test_each_machine_runs_the_same_engine_with_a_rank_of_its_own(
    make_engine: MakeEngine, site: Site
) -> None:
    engine = make_engine("--data-parallel-size", "3", nodes=site.nodes(2))
    seen: list[str] = []
    async with site.joining("a", "b"):
        await engine.start(lambda progress: seen.append(progress.message))
        words = [(await site.log(name, r"host 127\.0\.0\.1 words (.*)"))[1] for name in "ab"]
        answers = await ask(engine, "/echo")
    assert [answer.status for answer in answers] == [200]
    assert "waiting for nodes: 0 of 2 joined" in seen
    shared = "--data-parallel-size 3 --model fake --served-model-name fake"
    assert all(each.startswith(shared) for each in words)
    parts = sorted(each.partition("--nnodes")[2].split() for each in words)
    assert parts == [
        ["3", "--master-addr", "127.0.0.1", "--node-rank", rank, "--headless"] for rank in "12"
    ]


async def test_the_leader_is_told_of_the_same_machines(make_engine: MakeEngine, site: Site) -> None:
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    async with site.joining("a"):
        await engine.start()
        [answer] = await ask(engine, "/env")
        assert engine._nodes.words == ["--nnodes", "2", "--master-addr", "127.0.0.1"]
    assert b'"VLLM_HOST_IP": "127.0.0.1"' in answer.body


@pytest.mark.parametrize("whose", ["vLLM", "machine"])
async def test_the_end_of_a_node_ends_the_engine_at_once_and_it_starts_again(
    make_engine: MakeEngine, site: Site, whose: str
) -> None:
    """By the end of its vLLM, or of the process that runs it, for which no request is to blame."""
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    async with site.joining("a") as nodes, contextlib.AsyncExitStack() as more:
        await engine.start()
        session = session_of(engine)
        asking = asyncio.create_task(ask(engine, "/hang"))
        await site.log("a", "words")
        await asyncio.sleep(0.2)
        began = time.monotonic()
        if whose == "vLLM":
            for process in site.processes():
                os.kill(process, signal.SIGKILL)
        else:
            nodes[0].cancel()
        with pytest.raises(EngineLost, match=r"the node .* is lost") as lost:
            await asking
        assert isinstance(lost.value, EngineNotReached) is (whose == "machine")
        assert time.monotonic() - began < PATIENCE * 3
        assert session_of(engine) == session, "it is the engine that was lost"
        if whose == "machine":
            await more.enter_async_context(site.joining("b"))
        await engine.start()
        assert [answer.status for answer in await ask(engine, "/echo")] == [200]


async def test_a_node_ends_its_part_with_the_leader_and_joins_the_next_life(
    make_engine: MakeEngine, site: Site
) -> None:
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    async with site.joining("a"):
        await engine.start()
        await site.log("a", "words")
        assert site.processes()
        await engine.stop()
        await site.hears("the leader has ended the engine")
        assert not site.processes()
        await engine.start()
        await site.log("a", "words(.|\n)*words")


async def test_a_leader_that_is_killed_ends_the_nodes_part(site: Site) -> None:
    """With SIGKILL: the kernel closes its connections."""
    leads = str(site.port), KEY
    with own_engine(site.python, site.folder / "leader.log", "", *leads) as leader:
        async with site.joining("a"):
            await site.log("a", "words")
            leader.kill()
            await site.hears("the leader has ended the engine (the connection was")
            await site.hears("waiting for the leader")
            assert not site.processes()


async def test_a_node_that_never_comes_fails_the_start_with_a_count(
    make_engine: MakeEngine, site: Site
) -> None:
    engine = make_engine(nodes=site.nodes(2), start_timeout_seconds=0.6)
    async with site.joining("a"):
        with pytest.raises(EngineStartFailed, match=r"1 of 2 nodes joined the engine in 1 s"):
            await engine.start()
    with pytest.raises(OSError, match=r"."):
        await asyncio.open_connection("127.0.0.1", site.port)


async def test_a_port_that_is_taken_fails_the_start(make_engine: MakeEngine, site: Site) -> None:
    async with await asyncio.start_server(lambda *_: None, port=site.port):
        with pytest.raises(EngineStartFailed, match=f"cannot join on port {site.port}"):
            await make_engine("--seed", str(site.port), nodes=site.nodes(1)).start()


async def test_a_node_with_another_key_does_not_join_and_says_so(
    make_engine: MakeEngine, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(nodes=site.nodes(1), start_timeout_seconds=PATIENCE)
    stranger = asyncio.create_task(site.node("a", key=new_sealing_key()).run())
    starting = asyncio.create_task(engine.start())
    await site.hears("it has another key: BATCHYARD_SECRET_KEY or secret.key")
    starting.cancel()
    stranger.cancel()
    await asyncio.wait((starting, stranger))
    assert "engine.node_refused" in caplog.text
    assert not engine._nodes._joined


async def test_a_node_with_a_newer_key_than_its_leader_says_so_and_waits(
    make_engine: MakeEngine, site: Site
) -> None:
    """It can read what the leader seals, which cannot read what it seals."""
    engine = make_engine(nodes=site.nodes(1), start_timeout_seconds=PATIENCE * 10)
    newer = Node(
        "127.0.0.1",
        site.port,
        secret_keys=[new_sealing_key(), KEY],
        python=site.python,
        log_path=site.folder / "a.log",
        say=site.said.append,
    )
    joining = asyncio.create_task(newer.run())
    starting = asyncio.create_task(engine.start())
    await site.hears("it has another key: BATCHYARD_SECRET_KEY or secret.key")
    assert not joining.done()
    starting.cancel()
    joining.cancel()
    await asyncio.wait((starting, joining))


async def test_a_node_whose_gpus_are_slow_to_answer_is_not_lost(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process keeps the driver loaded, nvidia-smi needs many seconds."""
    monkeypatch.setattr(link, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(link, "ALIVE_SECONDS", 0.1)

    def slow(_: object) -> DeviceProfile:
        time.sleep(4)
        return CPU

    monkeypatch.setattr(node, "detect_profile", slow)
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    async with site.joining("a"):
        await engine.start()
        asking = asyncio.create_task(ask(engine, "/echo"))
        await site.log("a", "words")
        assert [answer.status for answer in await asking] == [200]


async def test_a_node_without_a_sign_of_life_is_lost(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that has lost its power: nothing closes the connection."""
    monkeypatch.setattr(link, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(link, "ALIVE_SECONDS", 0.1)
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    starting = asyncio.create_task(engine.start())
    silent = link.Link(*await connected(site.port), link_keys([KEY]))
    await silent.greet()
    silent.send({"name": "silent"})

    async def use() -> None:
        await starting
        await ask(engine, "/hang")

    lost = "the node silent is lost: there was no sign of life"
    with pytest.raises((EngineLost, EngineStartFailed), match=lost):
        await use()
    silent.close()


async def test_a_spare_node_takes_the_place_of_another(make_engine: MakeEngine, site: Site) -> None:
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    async with site.joining("a") as nodes:
        await engine.start()
        async with site.joining("b"):
            await asyncio.sleep(0.3)
            nodes[0].cancel()
            with pytest.raises(EngineLost):
                await ask(engine, "/hang")
            await engine.start()
            await site.log("b", "words")


async def test_a_spare_node_that_leaves_ends_nothing(make_engine: MakeEngine, site: Site) -> None:
    engine = make_engine(nodes=site.nodes(1))
    async with site.joining("a"):
        await engine.start()
        async with site.joining("b"):
            async with asyncio.timeout(PATIENCE * 10):
                while len(engine._nodes._joined) < 2:  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert [answer.status for answer in await ask(engine, "/echo")] == [200]


async def test_a_node_that_cannot_start_vllm_is_the_cause_of_the_failed_start(
    make_engine: MakeEngine, site: Site
) -> None:
    """With the lines of its log, which is on that machine."""
    engine = make_engine("--made-up", mode="node fails", nodes=site.nodes(1))
    async with site.joining("a"):
        with pytest.raises(
            EngineStartFailed, match=r"was ended: the node .* exit code 1"
        ) as failed:
            await engine.start()
    assert "ValueError: no such device" in str(failed.value)


async def test_a_node_without_the_weights_says_so(make_engine: MakeEngine, site: Site) -> None:
    engine = make_engine(nodes=site.nodes(1), weights="/nowhere/weights")
    async with site.joining("a"):
        with pytest.raises(EngineStartFailed, match=r"cannot run .*: it has no /nowhere/weights"):
            await engine.start()


async def test_machines_with_different_versions_of_vllm_do_not_start(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "vllm_version", lambda *_: "0.33.0")
    nodes = site.nodes(1)
    async with site.joining("a"):
        with pytest.raises(EngineStartFailed, match=r"has vLLM 0\.33\.0, and this machine has 0\."):
            await nodes.gather("0.32.0", PATIENCE * 10, lambda _: None)
    await nodes.close()


async def test_a_slurm_job_starts_its_nodes_itself_and_ends_them(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step on the other nodes, which learn from Slurm where it was started."""
    words = as_slurm_job(site, monkeypatch, SRUN)
    engine = make_engine("--seed", str(site.port), nodes=site.nodes(1))
    await engine.start()
    assert [answer.status for answer in await ask(engine, "/echo")] == [200]
    asked = words.read_text().split()
    assert asked[:4] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--exclude=node1"]
    await engine.stop()
    assert not site.processes()
    await engine.start()
    await engine.stop()


async def test_a_slurm_step_that_ends_fails_the_start_with_what_it_said(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_slurm_job(site, monkeypatch, "echo 'srun: error: Invalid node' >&2; exit 3")
    with pytest.raises(EngineStartFailed, match=r"exit code 3 .*\n    srun: error: Invalid node"):
        await make_engine(nodes=site.nodes(1)).start()


async def test_a_slurm_job_with_too_few_nodes_fails_the_start(
    make_engine: MakeEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_slurm_job(site, monkeypatch, "exit 1")
    with pytest.raises(EngineStartFailed, match=r"7 has too few nodes, 2: .* with --nodes=3\."):
        await make_engine(nodes=site.nodes(2)).start()


SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 exec "$@"
"""
"""Starts the command of one task on this machine."""


def as_slurm_job(site: Site, monkeypatch: pytest.MonkeyPatch, srun: str) -> Path:
    """This process is one of a job with two nodes; where the words for ``srun`` are written."""
    words = site.folder / "srun.words"
    script = site.folder / "bin" / "srun"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" > {words}\n{srun}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "node1"}
    ours = {
        "BATCHYARD_HOME": str(site.folder / "home"),
        "BATCHYARD_SECRET_KEY": KEY,
        "BATCHYARD_ENGINE_PYTHON": str(site.python),
    }
    for name, value in (job | ours).items():
        monkeypatch.setenv(name, value)
    return words


async def test_a_message_of_another_connection_is_refused() -> None:
    """Of one who has listened to the network and has no key."""
    messages: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with linked(reader, writer, link_keys([KEY])) as mine:
            messages.append(mine._keys.encrypt(b'{"for": "another"}'))
            mine._write(messages[0])
            with contextlib.suppress(LinkLost):
                await mine.receive()

    port = free_port()
    async with (
        await asyncio.start_server(serve, "127.0.0.1", port),
        linked(*await connected(port), link_keys([KEY])) as theirs,
    ):
        with pytest.raises(WrongKey, match="not for this connection"):
            await theirs.receive()


def test_nothing_of_the_key_itself_encrypts_a_link() -> None:
    """What is stored with the installation's key is no message."""
    assert link_keys([KEY])._fernets[0]._encryption_key not in KEY.encode()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--data-parallel-size 2 --nnodes 2", "nodes sets --nnodes itself"),
        ("-dp 2 --node-rank=1", "nodes sets --node-rank itself"),
        ("-dp 2 -r 1", "nodes sets --r itself"),
        ("-dp 2 --headless", "nodes sets --headless itself"),
        ("-dp 2 --master-addr 10.0.0.1", "nodes sets --master-addr itself"),
        ("-dp 2 --data-parallel-hybrid-lb", "leave --data-parallel-hybrid-lb out"),
        ("", "a multiple of 2 ranks, but the options have 1"),
        ("-tp 3", "a multiple of 2 ranks, but the options have 3"),
    ],
)
def test_options_that_contradict_nodes_are_refused(options: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_nodes(2, EngineOptions(options.split()), {})


@pytest.mark.parametrize("options", ["-dp 2", "-tp 4 -pp 2", "--data-parallel-size 4"])
def test_options_with_ranks_for_all_nodes_are_taken(options: str) -> None:
    check_nodes(2, EngineOptions(options.split()), {})


def test_one_address_for_all_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="VLLM_HOST_IP differs on each node"):
        check_nodes(2, EngineOptions(["-dp", "2"]), {"VLLM_HOST_IP": "10.0.0.1"})


def command_line(folder: Path) -> list[bytes]:
    try:
        return (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(PATIENCE * 10):
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.02)
