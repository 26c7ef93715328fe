"""The exporter of a worker: a process of its own, whose end is no concern of the worker.

The worker's parent process must have one thread, so it serves nothing itself. It starts the
exporter, and starts it again if it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import batchyard
from batchyard.cli.terminal.say import say
from batchyard.metrics.exporter.server import ExporterOptions
from batchyard.metrics.published import FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST_VARIABLE: Final = "BATCHYARD_METRICS_HOST"
PORT_VARIABLE: Final = "BATCHYARD_METRICS_PORT"
_PAUSE_SECONDS: Final = 5.0
"""Before an exporter that has ended by itself is there again."""
_END_SECONDS: Final = 2.0


class Exporter:
    """``/metrics`` of this process's flow runs, which are told by a variable where to publish.

    Nothing here raises an error: without its metrics, a worker works all the same.
    """

    def __init__(
        self, home: Path, host: str, port: int, *, pool: str, slots: Sequence[str]
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._options: ExporterOptions | None = None
        spool = home / "spool"
        try:
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="metrics-", dir=spool))
        except OSError as error:
            _say_without(error)
            return
        self._options = ExporterOptions(
            parent=os.getpid(),
            folder=str(folder),
            host=host,
            port=port,
            slots=list(slots),
            worker={"pool": pool, "version": batchyard.__version__},
        )
        self._start(self._options)

    @property
    def variables(self) -> Mapping[str, str]:
        """What the flow runs need to know."""
        return {} if self._options is None else {FOLDER_VARIABLE: self._options.folder}

    def has_ended(self, process: int) -> bool:
        """Start the exporter again if it was this child that ended; whether it was."""
        if self._process is None or self._options is None or self._process.pid != process:
            return False
        how = self._process.wait()
        say(f"batchyard: the process that serves /metrics ended ({how}); another starts.", err=True)
        self._start(msgspec.structs.replace(self._options, pause_seconds=_PAUSE_SECONDS))
        return True

    def close(self) -> None:
        """End it, and remove what flow runs have published."""
        # A further signal is about what has ended by now.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._options is not None:
            shutil.rmtree(self._options.folder, ignore_errors=True)

    def _start(self, options: ExporterOptions) -> None:
        self._process = None
        given = msgspec.json.encode(options).decode()
        words = [sys.executable, "-P", "-m", "batchyard.metrics.exporter", given]
        try:
            # Ctrl-C is for the command, which ends the exporter after its flow runs.
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0)
        except OSError as error:
            _say_without(error)


def _say_without(error: OSError) -> None:
    say(f"batchyard: /metrics is not served: {error.strerror}.", err=True)
