"""A real Slurm cluster: munged, slurmctld, and a slurmd for each node, all on this machine.

Its programs are Debian's, with a folder, ports and keys of their own. Where jobs of another
partition preempt a job, it has ``GRACE_SECONDS`` to end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE
from tests.services.debian import environment_of, unpacked_with_libraries
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

NODES = ("node1", "node2")
CPUS = 8
PARTITION = "gpu"
URGENT = "urgent"
"""The partition whose jobs preempt those of the other one."""
GRACE_SECONDS = 60
LOST_SECONDS = 5
"""A node that is silent for so long is down; slurmctld looks every third of this."""

_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_START_SECONDS = 30.0
_PLUGINS = "usr/lib/x86_64-linux-gnu/slurm-wlm"
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout={lost}
SlurmctldTimeout=5
MessageTimeout=5
TCPTimeout=2
KillWait=3
MinJobAge=600
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs={cpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime={grace}
PartitionName={urgent} Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=off
"""


@dataclass
class SlurmCluster:
    """A cluster that runs. ``bin`` has Slurm's commands, as a login node has them."""

    folder: Path
    bin: Path
    _root: Path
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What those have who use the cluster."""
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def call(self, *words: str, given: str = "") -> str:
        """What a command of Slurm prints; it must succeed."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            env=self.environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def jobs(self, *states: str) -> list[str]:
        """The ids of the jobs in one of these states, or of all, the oldest first."""
        which = ",".join(states) or "all"
        found = self.call("squeue", "--noheader", f"--states={which}", "--format=%A", "--sort=i")
        return found.split()

    def state_of(self, job: str) -> str:
        """Slurm's word for the state of a job, and its reason."""
        return self.call(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r"
        ).strip()

    def submit(self, *options: str, script: str = "exec sleep 600") -> str:
        """A job of somebody else; its id."""
        words = ("sbatch", "--parsable", "--output=/dev/null", *options)
        return self.call(*words, given=f"#!/bin/sh\n{script}\n").strip()

    def cancel_all(self) -> None:
        """Return when no job is left."""
        self.call("scancel", "--user=root")
        _wait(lambda: not self.jobs("PENDING", "RUNNING", "COMPLETING"), "the jobs did not end")

    def start(self, name: str) -> None:
        """Start ``slurmctld`` or a node's daemon, and return when it works."""
        if name == "slurmctld":
            self._start(name, "slurmctld", "-D")
            _wait(self._answers, "slurmctld does not answer")
            return
        stepd = str(_program(self._root, "slurmstepd"))
        self._start(name, "slurmd", "-D", "-N", name, "-d", stepd)
        _wait(lambda: self.node_state(name).startswith(("idle", "mix", "alloc")), f"{name} is away")

    def stop(self, name: str) -> None:
        """End a daemon; the jobs of a node live on."""
        process = self._processes.pop(name)
        process.terminate()
        process.wait(20)

    def lose(self, node: str) -> None:
        """A loss of power: the daemon and all processes of its jobs are gone."""
        process = self._processes.pop(node)
        process.kill()
        process.wait()
        mark = f"SLURMD_NODENAME={node}".encode()
        jobs = [pid for pid in self._processes_of_jobs() if mark in _environ(pid)]
        # First those that would report the end of the others.
        _kill({_parent(pid) for pid in jobs if "slurmstepd" in _command(_parent(pid))})
        _kill(jobs)

    def node_state(self, node: str) -> str:
        """Such as ``idle`` or ``down*``."""
        return self.call(
            "sinfo", "--noheader", f"--nodes={node}", "--format=%t", f"-p{PARTITION}"
        ).strip()

    def log(self, name: str) -> str:
        """The end of what a daemon has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def start_munge(self) -> None:
        """What each daemon and command proves its user with."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        names = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munge.pid"}
        names |= {"log-file": "munged.txt", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        _wait((self.folder / "munge.sock").exists, "munged did not start")

    def stop_all(self) -> None:
        """End everything, jobs too."""
        for name in [*self._processes]:
            process = self._processes.pop(name)
            process.kill()
            process.wait()
        jobs = self._processes_of_jobs()
        _kill({_parent(pid) for pid in jobs if "slurmstepd" in _command(_parent(pid))})
        _kill(jobs)

    def _start(self, name: str, program: str, *words: str) -> None:
        libraries = environment_of(self._root)
        environment = os.environ | libraries | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(_program(self._root, program)), *words],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        try:
            return bool(self.call("scontrol", "ping"))
        except (AssertionError, subprocess.TimeoutExpired):
            return False

    def _processes_of_jobs(self) -> list[int]:
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        environments = {pid: _environ(pid) for pid in found}
        return [
            pid
            for pid, variables in environments.items()
            if mark in variables and any(each.startswith(b"SLURM_JOB_ID=") for each in variables)
        ]


@contextlib.contextmanager
def running_slurm() -> Iterator[SlurmCluster]:
    """A cluster with two nodes that are idle. Skips where it cannot be."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons start jobs as their users: these tests need root.")
    root = _unpacked()
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder, _commands(root, folder), root)
    try:
        _configure(root, folder)
        cluster.start_munge()
        cluster.start("slurmctld")
        for node in NODES:
            cluster.start(node)
        yield cluster
    finally:
        cluster.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


def _unpacked() -> Path:
    """One folder with the files of all packages."""
    return unpacked_with_libraries(*_PACKAGES, name="slurm")


def _configure(root: Path, folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            port=free_port(),
            ports=[free_port() for _ in NODES],
            plugins=root / _PLUGINS,
            cpus=CPUS,
            partition=PARTITION,
            urgent=URGENT,
            grace=GRACE_SECONDS,
            lost=LOST_SECONDS,
        )
    )


def _commands(root: Path, folder: Path) -> Path:
    """Slurm's commands, which find their libraries whatever environment they are called with."""
    commands = folder / "bin"
    commands.mkdir()
    libraries = environment_of(root)["LD_LIBRARY_PATH"]
    for name in _COMMANDS:
        path = commands / name
        program = _program(root, name)
        path.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{program}" "$@"\n')
        path.chmod(0o755)
    return commands


def _program(root: Path, name: str) -> Path:
    candidates = [
        root / "usr" / folder / file for folder in ("sbin", "bin") for file in (name, f"{name}-wlm")
    ]
    return next(path for path in candidates if path.exists())


def _environ(pid: int) -> Sequence[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def _wait(condition: Callable[[], object], complaint: str) -> None:
    deadline = time.monotonic() + PATIENCE * _START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)
