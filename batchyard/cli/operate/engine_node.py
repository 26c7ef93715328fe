"""``batchyard engine-node``: this machine as a part of an engine that another one leads."""

from __future__ import annotations

import re
import socket
from typing import Annotated, Final

import typer

from batchyard.cli.terminal.say import say
from batchyard.cli.terminal.stoppable import run_stoppable
from batchyard.engine.vllm.nodes.link import DEFAULT_PORT
from batchyard.engine.vllm.nodes.node import Node
from batchyard.errors import SettingsError
from batchyard.services.machine.engine_python import engine_python
from batchyard.services.machine.home import in_home
from batchyard.services.machine.secret_key import key_file, read_secret_keys
from batchyard.settings import read_settings

_LEADER_VARIABLES: Final = ["LWS_LEADER_ADDRESS", "SLURM_LAUNCH_NODE_IPADDR"]
"""Of a pod of a LeaderWorkerSet, and of a task that `srun` has started."""


def engine_node(
    leader: Annotated[
        str,
        typer.Argument(
            envvar=_LEADER_VARIABLES,
            help="The machine whose GPU worker runs the model: its name or address.",
        ),
    ],
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="The port there: nodes_port of the engine's block."),
    ] = DEFAULT_PORT,
    once: Annotated[
        bool, typer.Option("--once", help="End when the leader has ended its engine.")
    ] = False,
) -> None:
    """Run a part of an engine whose block has `nodes`, until Ctrl-C or SIGTERM.

    It waits for the GPU worker that leads the engine, and joins it again after each restart.
    """
    settings = read_settings()
    if settings.secret_key is None and not key_file(settings).exists():
        raise SettingsError(
            f"This machine has no key of the installation: set BATCHYARD_SECRET_KEY, or copy "
            f"{key_file(settings).name} from the leader to {settings.home_folder}."
        )
    with in_home(settings) as home:
        logs = home / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
    # In a home that several machines share, each has a log of its own.
    name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    node = Node(
        leader,
        port,
        secret_keys=read_secret_keys(settings),
        python=engine_python(settings),
        log_path=logs / f"engine-node-{name}-{port}.log",
        say=lambda text: say(f"batchyard: {text}", err=True),
    )

    async def work() -> int:
        await node.run(once=once)
        return 0

    if status := run_stoppable(work):
        raise typer.Exit(status)
