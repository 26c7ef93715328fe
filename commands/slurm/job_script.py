"""The script of a job, and the words of `sbatch`. Pure.

No secret is in it: everybody may read a job's script and options who may read the job.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from commands.slurm.options import JobOptions

COMMAND: Final = "batchyard execute"
_AFTER_DRAIN_SECONDS: Final = 60
"""What a flow run may take after its drain: its engine has ten seconds, Prefect records its end."""

_SCRIPT: Final = """\
#!/bin/bash
export BATCHYARD_MACHINE="$SLURMD_NODENAME-$SLURM_JOB_ID"
# Not a folder that others on the node can foresee, and make first.
export BATCHYARD_HOME={scratch}/"batchyard-$SLURM_JOB_ID-$(</proc/sys/kernel/random/uuid)"
export PREFECT_HOME="$BATCHYARD_HOME/prefect"
# Slurm's signal is for this script, and it is not to end it.
trap 'is_told=1; [ -z "$runner" ] || kill -TERM "$runner"' TERM
{setup}
{command} &
runner=$!
[ -z "$is_told" ] || kill -TERM "$runner"
# A signal ends the wait, and not the runner.
while :; do wait "$runner"; status=$?; kill -0 "$runner" 2>/dev/null || break; done
wait "$runner" 2>/dev/null; again=$?; [ "$again" = 127 ] || status=$again
rm -rf "$BATCHYARD_HOME"
exit "$status"
"""


def lead_seconds(drain_seconds: int) -> int:
    """How long before its end a job is told of it."""
    return drain_seconds + _AFTER_DRAIN_SECONDS


def script_of(options: JobOptions) -> str:
    """The script: one engine of this node, in a folder that is removed when it has ended.

    Each job is a machine of its own: it has the GPUs that Slurm gives to it, whatever other jobs
    are on the node.
    """
    return _SCRIPT.format(
        scratch=shlex.quote(options.scratch),
        setup=options.setup,
        command=options.command or COMMAND,
    )


def words_of(options: JobOptions, *, name: str, comment: str, output: str) -> list[str]:
    """The command that submits the script, which it reads from its standard input.

    ``output`` is the path of the job's output, with Slurm's ``%j`` for its id.
    """
    given = {
        "job-name": name,
        "comment": comment,
        "output": output,
        "chdir": options.scratch,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "gres": f"gpu:{options.gpus}" if str(options.gpus) != "0" else None,
        "cpus-per-task": options.cpus,
        "mem": options.memory,
        "time": options.time_limit,
        "nodes": 1,
        "export": "ALL",
        "signal": f"B:TERM@{lead_seconds(options.drain_seconds)}",
    }
    words = [f"--{option}={value}" for option, value in given.items() if value is not None]
    # The flow run of a job that was told to end has ended. Whether another one is needed, the
    # scheduler knows, and not Slurm.
    return ["sbatch", "--parsable", "--no-requeue", *words, *options.options]
