"""A Prefect server that leaves the processor to batches."""

from __future__ import annotations

from datetime import timedelta

from docket import Docket, Worker

from commands.prefect.lean import look_less_often


def test_its_worker_looks_once_a_second_unless_it_is_told_otherwise() -> None:
    class Ours(Worker):
        pass

    look_less_often(Ours)
    docket = Docket("test", "memory://")
    second, minute = timedelta(seconds=1), timedelta(minutes=1)
    ours = Ours(docket)
    assert (ours.minimum_check_interval, ours.scheduling_resolution) == (second, second)
    assert Ours(docket, scheduling_resolution=minute).scheduling_resolution == minute
    assert Worker(docket).scheduling_resolution < second
