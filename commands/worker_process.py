"""Prefect's worker as a child process that is stopped without killing its flow runs.

At SIGTERM, Prefect's worker kills its flow runs with SIGKILL: their requests are lost, and their
leases keep others waiting until they expire. So the signal goes to the flow runs instead, which end
in order (flows/process/stop_signal.py), and the worker ends after them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from batchyard.cli.terminal.stoppable import stop_signals
from batchyard.processes.orphan import end_with_parent
from commands.prefect_worker.forked_run import catches
from flows.process.stop_signal import STOP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from commands.exporter_process import Exporter

_END_SECONDS: Final = 30.0
"""What a flow run may take after its drain: its engine has ten seconds, Prefect records its end."""
_POLL_SECONDS: Final = 0.1


class _Stop(BaseException):
    """A signal that drains has come. No Exception, so that nothing takes it for an error."""


def run_worker(
    words: Sequence[str],
    environment: Mapping[str, str],
    drain_seconds: float,
    exporter: Exporter | None = None,
) -> int:
    """Run Prefect's worker until it ends; its exit status, or 0 after SIGTERM.

    ``exporter`` is watched, and started again if it ends; this process has no other children.
    SIGINT ends the worker and its flow runs at once, and so does a second SIGTERM. A closed
    terminal drains like SIGTERM, unless ``nohup`` ignores it.
    """
    worker: subprocess.Popen[bytes] | None = None
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, _raise_stop)
    try:
        worker = subprocess.Popen(
            words,
            env=dict(environment),
            # Ctrl-C is for us: the worker takes a second one for an order to kill itself.
            process_group=0,
            # If we are killed, the worker gets SIGTERM: two workers must not have one GPU.
            preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - there is one thread
        )
        signal.signal(signal.SIGINT, lambda *_: worker.send_signal(signal.SIGINT))
        return worker.wait() if exporter is None else _wait(worker, exporter)
    except _Stop:
        if worker is not None:
            _stop(worker, drain_seconds + _END_SECONDS)
        return 0


def _wait(worker: subprocess.Popen[bytes], exporter: Exporter) -> int:
    while (status := worker.poll()) is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_pid == worker.pid or exporter.has_ended(ended.si_pid):
            continue
        # The first process of a container gets the orphans of all others.
        os.waitpid(ended.si_pid, 0)
    return status


def _raise_stop(number: int, _frame: object) -> NoReturn:
    if number == signal.SIGHUP:
        # The shell of a closed terminal sends one, and the kernel another one when the shell ends.
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


def _stop(worker: subprocess.Popen[bytes], seconds: float) -> None:
    # A worker that stands still takes no further flow run, and kills none of those that it has.
    worker.send_signal(signal.SIGSTOP)
    runs = _children(worker.pid)
    try:
        for run in runs:
            _signal([run], STOP if catches(run, STOP) else signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while any(map(_is_alive, runs)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    except _Stop:
        pass
    finally:
        _signal(runs, signal.SIGKILL)
        worker.kill()
        worker.wait()


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        # The worker has not reaped them, so their ids are theirs.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _children(process: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (thread / "children").read_text().split())
    return found


def _is_alive(process: int) -> bool:
    """Whether it runs; one that has ended is a zombie, as its parent stands still."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
