"""Ten million batches a day on a thousand engines: what that asks of each part, and which ends.

What each call costs is counted on the real Store (:mod:`benchmarks.scale_costs`), how often it
happens is simulated with the real plan of runners (:mod:`benchmarks.scale_day`), and this puts the
two together. ``docs/scale.md`` has the result; ``python -m benchmarks internet_scale`` rewrites it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batchyard import intervals
from batchyard.store.database import MOST_CONNECTIONS
from batchyard.turns import Room
from benchmarks import scale_costs, scale_day
from benchmarks.scale_costs import Cost, Costs
from benchmarks.scale_day import Day, Load
from tests.services.postgres import postgres_on
from tests.services.prefect import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

LOADS: Final = {
    "engines for the busiest hour": Load(scale=25, used=0.55),
    "engines for the average hour": Load(scale=25, used=0.8),
}
PREFECT_SECONDS: Final = 0.133
CONTROL_SECONDS: Final = 0.102
"""Of processor time for each small batch: benchmark B6."""
_FLUSH_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 2.0
_RECONCILE_SECONDS: Final = 10.0
_RENEW_SECONDS: Final = 10.0
_EXPIRED_SECONDS: Final = 2.0
SCHEDULER_LEASE_SECONDS: Final = 15.0
FORECAST_SECONDS: Final = 60.0
HELD: Final = Room(scale_costs.HELD_AT_ONCE).free
"""Batches that one control process has at most."""

STATEMENTS_A_SECOND: Final = 50_000.0
READ_A_SECOND: Final = 20e6
WRITTEN_A_SECOND: Final = 20_000.0
CONNECTIONS: Final = 5_000
"""What one large PostgreSQL server is taken to do: an assumption, for want of such a machine."""
_SMALLEST, _LARGEST = 1e-4, 100.0


@dataclass(frozen=True)
class Moment:
    """``arrivals``, ``claims``: a second. The others are numbers of batches and engines."""

    arrivals: float
    claims: float
    in_progress: float
    busy: float
    idle: float

    @classmethod
    def of(cls, day: Day) -> Moment:
        """The hour with the most batches in progress, and the most arrivals of the day."""
        hour = slice(max(0, day.peak - 60), day.peak + 1)
        return cls(
            float(_hourly(day.arrivals)),
            float(_hourly(day.claims)),
            float(day.in_progress[day.peak]),
            float(day.busy[hour].mean()),
            float(day.idle[hour].mean()),
        )

    def times(self, share: float) -> Moment:
        """A load that is so much larger, with as many more engines."""
        return Moment(*(share * each for each in vars(self).values()))

    @property
    def processes(self) -> float:
        """Of `run-batches`."""
        return max(1.0, self.in_progress / HELD)


def _hourly(series: object) -> float:
    """The most of any hour: minutes of a small simulation have too few."""
    values = list(series)  # type: ignore[call-overload]
    size = min(60, len(values))
    return max(sum(values[first : first + size]) / size for first in range(len(values) - size + 1))


@dataclass(frozen=True)
class Wall:
    """``ends_at``: batches a day. ``needed``, ``available``: at the load's size, in words."""

    name: str
    needed: str
    available: str
    ends_at: float


def needs(costs: Costs, moment: Moment) -> dict[str, Cost]:
    """What is asked of the database in a second, by whom."""
    lines, waiting = costs.by_batches, moment.in_progress

    def by_waiting(name: str, times: float) -> Cost:
        """What depends on the others that wait: the rest is in the life of the batch."""
        return Cost(0.0, lines[name].each.read * waiting * times, 0.0)

    looks = (scale_costs.DEMAND, scale_costs.FORECASTS, scale_costs.POINTS_OF_ALL)
    return {
        "lives of batches": _times(costs.batch, moment.arrivals),
        "further chunks": _times(costs.chunk, max(0.0, moment.claims - moment.arrivals)),
        "engines: polls, heartbeats, progress": _sum(
            _times(costs.runner_second, moment.busy + moment.idle),
            _times(lines[scale_costs.PROGRESS].fixed, moment.busy / _FLUSH_SECONDS),
        ),
        "claims of chunks": by_waiting(scale_costs.CHUNK_CLAIM, moment.claims),
        "control processes: looks and leases": _sum(
            _times(costs.control_second, moment.processes),
            _times(
                lines[scale_costs.HELD_LOOK].fixed,
                waiting / scale_costs.HELD_AT_ONCE / intervals.POLL_SECONDS,
            ),
            _times(
                lines[scale_costs.HELD_RENEWAL].fixed,
                waiting / scale_costs.HELD_AT_ONCE / _RENEW_SECONDS,
            ),
        ),
        "claims of batches": _sum(
            by_waiting(scale_costs.BATCH_CLAIM, moment.processes / intervals.POLL_SECONDS),
            by_waiting(scale_costs.EXPIRED, moment.processes / _EXPIRED_SECONDS),
        ),
        "the scheduler and the reconciler": _sum(
            *(_times(lines[name].at(waiting), 1 / _LOOK_SECONDS) for name in looks),
            _times(lines[scale_costs.WAITS].at(waiting), 1 / _LOOK_SECONDS),
            _times(lines[scale_costs.RECONCILE].at(waiting), 1 / _RECONCILE_SECONDS),
        ),
    }


def look_seconds(costs: Costs, waiting: float, plan_seconds: float) -> float:
    """What engines wait for: the demand and the plan, on this machine."""
    return plan_seconds + costs.by_batches[scale_costs.DEMAND].at(waiting).seconds


def forecast_seconds(costs: Costs, waiting: float) -> float:
    """What is written for people beside the looks, on this machine."""
    calls = (scale_costs.FORECASTS, scale_costs.POINTS_OF_ALL, scale_costs.WAITS)
    return sum(costs.by_batches[name].at(waiting).seconds for name in calls)


def walls(costs: Costs, day: Day, load: Load, plan_seconds: float) -> list[Wall]:
    """What ends, the first one first."""
    moment, batches = Moment.of(day), load.batches

    def wall(name: str, unit: str, available: float, need: Callable[[Moment], float]) -> Wall:
        return Wall(
            name,
            f"{_short(need(moment))} {unit}",
            f"{_short(available)} {unit}",
            batches * _largest(lambda share: need(moment.times(share)) <= available),
        )

    def of_all(column: str) -> Callable[[Moment], float]:
        return lambda at: sum(getattr(each, column) for each in needs(costs, at).values())

    found = [
        wall(
            "Prefect's server, one process",
            "cores",
            1.0,
            lambda at: at.arrivals * PREFECT_SECONDS,
        ),
        wall(
            "PostgreSQL, connections",
            "connections",
            CONNECTIONS,
            lambda at: MOST_CONNECTIONS * (at.busy + at.idle + at.processes),
        ),
        wall("PostgreSQL, rows read", "a second", READ_A_SECOND, of_all("read")),
        wall("PostgreSQL, rows written", "a second", WRITTEN_A_SECOND, of_all("written")),
        wall("PostgreSQL, statements", "a second", STATEMENTS_A_SECOND, of_all("statements")),
        wall(
            "the scheduler's look, before its lease ends",
            "seconds",
            SCHEDULER_LEASE_SECONDS,
            lambda at: look_seconds(costs, at.in_progress, plan_seconds),
        ),
        wall(
            "forecasts that are a minute old",
            "seconds",
            FORECAST_SECONDS,
            lambda at: forecast_seconds(costs, at.in_progress),
        ),
    ]
    return sorted(found, key=lambda each: each.ends_at)


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest share of the load for which it holds."""
    low, high = _SMALLEST, _LARGEST
    if holds(high):
        return high
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _times(cost: Cost, times: float) -> Cost:
    return Cost(cost.statements * times, cost.read * times, cost.written * times)


def _sum(*costs: Cost) -> Cost:
    return Cost(
        sum(each.statements for each in costs),
        sum(each.read for each in costs),
        sum(each.written for each in costs),
    )


# -- the page -------------------------------------------------------------------------------


def prices(costs: Costs) -> str:
    """What each call costs."""
    rows = [
        ("the life of a batch of ten lines", costs.batch, None),
        ("each further chunk", costs.chunk, None),
        ("a second of a control process without work", costs.control_second, None),
        ("a second of an engine without work", costs.runner_second, None),
        *((name, line.fixed, line.each) for name, line in costs.by_batches.items()),
    ]
    lines = [
        "| PostgreSQL | statements | rows read | … and for each batch in progress | rows written |",
        "|---|---|---|---|---|",
    ]
    for name, cost, each in rows:
        more = "" if each is None else _short(each.read)
        lines.append(
            f"| {name} | {_short(cost.statements)} | {_short(cost.read)} | {more} "
            f"| {_short(cost.written)} |"
        )
    return "\n".join(lines)


def days(found: dict[str, Day]) -> str:
    """What the simulated days were like."""
    rows: dict[str, Callable[[Day], str]] = {
        "batches, chunks": lambda day: f"{_short(day.batches)}, {_short(day.chunks)}",
        "most arrivals in a second": lambda day: _short(_hourly(day.arrivals)),
        "most batches in progress": lambda day: f"**{_short(day.in_progress[day.peak])}**",
        "control processes for them": lambda day: _short(Moment.of(day).processes),
        "engines without work in that hour": lambda day: _short(Moment.of(day).idle),
        "seconds of a batch up to 256 lines, p50 / p99": lambda day: _pair(day.small_waits),
        "seconds of a larger batch, p50 / p99": lambda day: _pair(day.large_waits),
        "engines started; lost with a lease": lambda day: (
            f"{_short(day.starts)}; {_short(day.lost_leases)}"
        ),
    }
    heading = "| a day of ten million batches | " + " | ".join(found) + " |"
    lines = [heading, "|---|" + "---|" * len(found)]
    lines += [
        f"| {name} | {' | '.join(words(day) for day in found.values())} |"
        for name, words in rows.items()
    ]
    return "\n".join(lines)


def loads_of_database(costs: Costs, found: dict[str, Day]) -> str:
    """What the database has to do in the worst moment of each day."""
    heading = "| rows read a second, in the worst moment | " + " | ".join(found) + " |"
    lines = [heading, "|---|" + "---|" * len(found)]
    asked = [needs(costs, Moment.of(day)) for day in found.values()]
    lines += [
        f"| {name} | {' | '.join(_short(each[name].read) for each in asked)} |" for name in asked[0]
    ]
    totals = [_sum(*each.values()) for each in asked]
    lines.append(f"| **all** | {' | '.join(f'**{_short(each.read)}**' for each in totals)} |")
    lines.append(
        f"| statements; rows written, of all | "
        f"{' | '.join(f'{_short(each.statements)}; {_short(each.written)}' for each in totals)} |"
    )
    return "\n".join(lines)


def ends(found: dict[str, list[Wall]]) -> str:
    """Where the design ends."""
    lines = [
        "| | which part | at ten million a day | there is | ends at, batches a day |",
        "|---|---|---|---|---|",
    ]
    for name, some in found.items():
        lines += [
            f"| {name if number == 0 else ''} | {wall.name} | {wall.needed} | {wall.available} "
            f"| **{_short(wall.ends_at)}** |"
            for number, wall in enumerate(some)
        ]
    return "\n".join(lines)


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(f"{value:,.0f}" for value in values)


def _short(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if unit == ' k' else size):.3g}{unit}".replace("e+0", "e")
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


async def measure(**size: object) -> Costs:
    """On a PostgreSQL of its own."""
    with postgres_on(free_port()) as cluster:
        return await scale_costs.measure(cluster, **size)  # type: ignore[arg-type]  # callers give its names and types


def section() -> str:
    """Measure, simulate, and return what the page is to say."""
    costs = asyncio.run(measure())
    plan_seconds = scale_day.plan_seconds(1000)
    found = {name: scale_day.simulate(load) for name, load in LOADS.items()}
    ended = {name: walls(costs, day, LOADS[name], plan_seconds) for name, day in found.items()}
    seconds = ", ".join(
        f"{count:,} batches in progress {look_seconds(costs, count, plan_seconds):.2g} s and "
        f"{forecast_seconds(costs, count):.2g} s"
        for count in (1_000, 10_000, 100_000)
    )
    rest = (
        f"On SQLite the life of a batch is {_short(costs.sqlite_statements)} statements. The plan "
        f"of runners for 1,000 engines of {scale_day.MODELS} models takes "
        f"{1000 * plan_seconds:.0f} ms. A look, and then the forecasts, take on this machine with "
        f"{seconds}."
    )
    return "\n\n".join(
        (ends(ended), days(found), loads_of_database(costs, found), prices(costs), rest)
    )


if __name__ == "__main__":
    print(section())
