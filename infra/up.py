"""`make up`: everything on this machine, in the foreground, until Ctrl-C.

Prefect's server and UI, the two work pools, the deployments, the demo's tiny model as an engine
block, and a worker on each pool. Logs and the database lie in ``.batchyard``. For machines of
your own see ``docs/how-to/run-from-prefect.md``, which does the same by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(os.environ.get("BATCHYARD_HOME", ROOT / ".batchyard")).expanduser().absolute()
PORT = os.environ.get("PREFECT_SERVER_API_PORT", "4200")
API_URL = f"http://127.0.0.1:{PORT}/api"
BIN = Path(sys.executable).parent
START_SECONDS = 90.0
STOP_SECONDS = 20.0

ENVIRONMENT = os.environ | {
    "BATCHYARD_HOME": str(HOME),
    "PREFECT_HOME": str(HOME / "prefect"),
    "PREFECT_API_URL": API_URL,
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_API_URL": API_URL,
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
}

TINY_MODEL = """
from pathlib import Path
from blocks import VllmEngineBlock
VllmEngineBlock(
    model="tiny-chat",
    weights=str(Path(".models/tiny-chat").absolute()),
    options="--max-model-len 2048 --enforce-eager",
).save("tiny-chat", overwrite=True)
"""

EXAMPLE = f"""
Prefect's UI:  http://127.0.0.1:{PORT}
Logs:          {HOME}/logs

A batch, from another terminal:
  export PREFECT_API_URL={API_URL} BATCHYARD_HOME={HOME}
  .venv/bin/batchyard submit -i examples/mixed.jsonl -o results.jsonl
  .venv/bin/batchyard show BATCH_ID

Ctrl-C stops everything.
"""


def main() -> int:
    (HOME / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    if _answers():
        print(f"Port {PORT} is taken: set PREFECT_SERVER_API_PORT to another.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        processes["server"] = _start("server", "server", "start", "--port", PORT)
        _wait_for_server(processes["server"])
        for pool in ("control", "gpu"):
            _run("work-pool", "create", pool, "--type", "process", "--overwrite")
        _run("work-pool", "set-concurrency-limit", "gpu", "1")
        _run("--no-prompt", "deploy", "--all")
        _run("block", "register", "-m", "blocks")
        subprocess.run([sys.executable, "-c", TINY_MODEL], cwd=ROOT, env=ENVIRONMENT, check=True)
        for pool in ("control", "gpu"):
            processes[pool] = _start(pool, "worker", "start", "--pool", pool)
        print(EXAMPLE, flush=True)
        return _wait_for_an_end(processes)
    except KeyboardInterrupt:
        return 0
    finally:
        print("Stopping …", flush=True)
        for name in ("control", "gpu", "server"):
            if name in processes:
                _stop(processes[name])


def _start(name: str, *words: str) -> subprocess.Popen[bytes]:
    """A session of its own: the terminal's Ctrl-C is for us, who stop things in their order."""
    with (HOME / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [BIN / "prefect", *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _run(*words: str) -> None:
    done = subprocess.run(
        [BIN / "prefect", *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"prefect {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


def _wait_for_server(server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers():
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"The Prefect server did not start; its log: {HOME}/logs/server.log")
        time.sleep(0.2)


def _wait_for_an_end(processes: dict[str, subprocess.Popen[bytes]]) -> int:
    while True:
        for name, process in processes.items():
            if process.poll() is not None:
                print(f"{name} has ended; its log: {HOME}/logs/{name}.log", file=sys.stderr)
                return 1
        time.sleep(0.5)


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"{API_URL}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
