"""Not Prefect's own `worker start`, because that starts flow runs in seconds (ADR 74).

``python -m commands.prefect_worker worker start …`` takes the words of Prefect's own command.
"""

from __future__ import annotations

import gc
import os

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def main() -> None:
    """Start the fork server, then be Prefect's worker."""
    # What imports make stays: to look for garbage among it takes a tenth of their time.
    gc.disable()
    environment = dict(os.environ)
    # A library of numpy starts threads, which no flow needs and which are lost in a fork.
    os.environ[_BLAS_THREADS] = "1"
    from commands.prefect_worker import flow_run, fork_server  # noqa: PLC0415 - with the variable

    os.environ.clear()
    os.environ.update(environment)
    gc.enable()
    name = fork_server.start(flow_run.run_flow_run) if fork_server.is_possible() else None
    # From here on there are threads, so nothing more is forked from this process.
    from prefect.cli import app  # noqa: PLC0415 - see above

    # Their import is what lets Prefect take our classes.
    import commands.slurm.worker  # noqa: F401, PLC0415 - see above
    from commands.prefect_worker.worker import use_fork_server  # noqa: PLC0415 - see above

    if name is not None:
        use_fork_server(name)
    app()


if __name__ == "__main__":
    main()
