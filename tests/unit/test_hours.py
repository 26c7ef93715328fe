"""When an engine is open: cron, zones, changed clocks, windows that overlap, time that passes."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from math import inf
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.schedule.hours import ALWAYS, Hours, HoursWindow, OpenTime, why_closed

BERLIN = "Europe/Berlin"
NEW_YORK = "America/New_York"
WEEKNIGHTS = Hours((HoursWindow("0 20 * * 1-5", duration="10h", timezone=BERLIN),))
HALF_HOURS = Hours((HoursWindow("0 * * * *", duration="30m"),))


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def shown(hours: Hours, after: str, zone: str = BERLIN, count: int = 1) -> list[tuple[str, str]]:
    """The first pieces, as clocks in the zone show them, with their distance from UTC."""
    found = islice(hours.pieces(at(after, zone)), count)
    return [(_clock(start, zone), _clock(end, zone)) for start, end in found]


def _clock(seconds: float, zone: str) -> str:
    return datetime.fromtimestamp(seconds, ZoneInfo(zone)).isoformat(timespec="minutes")


def test_without_windows_an_engine_is_always_open() -> None:
    assert ALWAYS.is_open(0.0)
    assert ALWAYS.opening(5.0) == 5.0
    assert ALWAYS.closing(5.0) is None
    assert why_closed("m", ALWAYS, 0.0) is None


@pytest.mark.parametrize(
    ("moment", "is_open"),
    [
        ("2026-11-23T19:59:59", False),  # a Monday
        ("2026-11-23T20:00", True),
        ("2026-11-24T05:59:59", True),
        ("2026-11-24T06:00", False),
        ("2026-11-28T05:59", True),  # the night that Friday began
        ("2026-11-28T20:00", False),
    ],
)
def test_a_window_is_open_from_its_start_to_before_its_end(moment: str, is_open: bool) -> None:
    assert WEEKNIGHTS.is_open(at(moment)) is is_open


def test_pieces_begin_now_where_it_is_open_now() -> None:
    assert shown(WEEKNIGHTS, "2026-11-27T23:00", count=2) == [
        ("2026-11-27T23:00+01:00", "2026-11-28T06:00+01:00"),
        ("2026-11-30T20:00+01:00", "2026-12-01T06:00+01:00"),
    ]


# Clocks change on 29 March and 25 October 2026 in Berlin, on 8 March and 1 November in New York.
@pytest.mark.parametrize(
    ("zone", "evening", "duration_ends", "until_ends"),
    [
        (BERLIN, "2026-03-28T20:00", "2026-03-29T07:00+02:00", "2026-03-29T06:00+02:00"),
        (BERLIN, "2026-10-24T20:00", "2026-10-25T05:00+01:00", "2026-10-25T06:00+01:00"),
        (NEW_YORK, "2026-03-07T20:00", "2026-03-08T07:00-04:00", "2026-03-08T06:00-04:00"),
        (NEW_YORK, "2026-10-31T20:00", "2026-11-01T05:00-05:00", "2026-11-01T06:00-05:00"),
    ],
)
def test_when_clocks_change_a_duration_keeps_its_length_and_until_its_time(
    zone: str, evening: str, duration_ends: str, until_ends: str
) -> None:
    nightly = "0 20 * * *"
    by_length = Hours((HoursWindow(nightly, duration="10h", timezone=zone),))
    by_clock = Hours((HoursWindow(nightly, until="06:00", timezone=zone),))
    assert shown(by_length, evening, zone)[0][1] == duration_ends
    assert shown(by_clock, evening, zone)[0][1] == until_ends


@pytest.mark.parametrize(
    ("zone", "before", "start", "end"),
    [
        # 02:30 is not on the clock: it begins when the clock goes on.
        (BERLIN, "2026-03-29T00:00", "2026-03-29T03:00+02:00", "2026-03-29T04:00+02:00"),
        (NEW_YORK, "2026-03-08T00:00", "2026-03-08T03:00-04:00", "2026-03-08T04:00-04:00"),
    ],
)
def test_a_start_that_the_clock_skips_is_not_lost(
    zone: str, before: str, start: str, end: str
) -> None:
    hours = Hours((HoursWindow("30 2 * * *", duration="1h", timezone=zone),))
    assert shown(hours, before, zone) == [(start, end)]
    assert hours.is_open(datetime.fromisoformat(start).timestamp() + 600)


@pytest.mark.parametrize(
    ("zone", "before", "first"),
    [
        (BERLIN, "2026-10-25T00:00", ("2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00")),
        (NEW_YORK, "2026-11-01T00:00", ("2026-11-01T01:30-04:00", "2026-11-01T01:30-05:00")),
    ],
)
def test_a_start_that_the_clock_shows_twice_counts_once(
    zone: str, before: str, first: tuple[str, str]
) -> None:
    cron = "30 2 * * *" if zone == BERLIN else "30 1 * * *"
    hours = Hours((HoursWindow(cron, duration="1h", timezone=zone),))
    found = shown(hours, before, zone, count=2)
    assert found[0] == first
    assert found[1][0][:10] > first[0][:10]


def test_an_end_that_the_clock_shows_twice_comes_after_its_start() -> None:
    hours = Hours((HoursWindow("*/10 * * * *", until="02:30", timezone=BERLIN),))
    second = datetime.fromisoformat("2026-10-25T02:20:00+01:00").timestamp()
    assert next(hours.pieces(second)) == (second, second + 600)


def test_windows_that_overlap_are_one_and_those_in_other_zones_count_there() -> None:
    hours = Hours(
        (
            HoursWindow("0 20 * * *", duration="4h", timezone=BERLIN),
            HoursWindow("0 22 * * *", duration="1h", timezone=BERLIN),  # inside of the first
            HoursWindow("0 17 * * *", duration="3h", timezone=NEW_YORK),  # 23:00 to 02:00
        )
    )
    assert shown(hours, "2026-11-23T12:00", count=3) == [
        ("2026-11-23T20:00+01:00", "2026-11-24T00:00+01:00"),
        ("2026-11-24T00:00+01:00", "2026-11-24T02:00+01:00"),
        ("2026-11-24T20:00+01:00", "2026-11-25T00:00+01:00"),
    ]
    assert hours.closing(at("2026-11-23T21:00")) == at("2026-11-24T02:00")
    assert hours.closing(at("2026-11-23T12:00")) == at("2026-11-23T12:00")


@pytest.mark.parametrize("moment", [0.0, 59.0, 59.001, 59.999, 60.0, 60.5])
def test_an_engine_whose_windows_never_end_does_not_close(moment: float) -> None:
    hours = Hours((HoursWindow("* * * * *", duration="1m"),))
    assert hours.is_open(moment)
    assert hours.closing(moment) is None


def test_the_reason_names_the_engine_and_when_it_opens_where_the_operator_lives() -> None:
    assert why_closed("org/m", WEEKNIGHTS, at("2026-11-23T12:00")) == (
        "the hours of engine org/m begin at 20:00 Europe/Berlin"
    )
    assert why_closed("org/m", WEEKNIGHTS, at("2026-11-28T12:00")) == (
        "the hours of engine org/m begin on 2026-11-30 at 20:00 Europe/Berlin"
    )
    assert why_closed("org/m", WEEKNIGHTS, at("2026-11-23T22:00")) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cron": "0 20 * *", "duration": "1h"}, "five fields"),
        ({"cron": "0 0 20 * * 1", "duration": "1h"}, "five fields"),
        ({"cron": "99 20 * * *", "duration": "1h"}, "Bad minute"),
        ({"cron": "0 0 31 2 *", "duration": "1h"}, "Bad day-of-month"),
        ({"cron": "0 20 * * *"}, "duration or until"),
        ({"cron": "0 20 * * *", "duration": "1h", "until": "06:00"}, "duration or until"),
        ({"cron": "0 20 * * *", "duration": "ten"}, "numbers with d, h, m or s"),
        ({"cron": "0 20 * * *", "duration": "8d"}, "7d at most"),
        ({"cron": "0 20 * * *", "until": "24:00"}, "time on the clock"),
        ({"cron": "0 20 * * *", "until": "06:00", "timezone": "Berlin"}, "'Berlin' is not known"),
        ({"cron": "0 20 * * *", "until": "06:00", "timezone": "../x"}, "is not known"),
    ],
)
def test_a_window_that_means_nothing_is_refused_with_the_reason(
    fields: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        HoursWindow(**fields)


def test_hours_are_the_same_after_they_were_json() -> None:
    windows = (*WEEKNIGHTS.windows, HoursWindow("0 0 * * 6", until="12:00"))
    text = msgspec.json.encode(windows)
    assert msgspec.json.decode(text, type=tuple[HoursWindow, ...]) == windows


# -- time that passes in them -----------------------------------------------------------------


def test_open_time_passes_only_while_it_is_open() -> None:
    time = OpenTime(HALF_HOURS, 0.0)
    assert time.later(0.0, 1800.0) == 1800.0
    assert time.later(0.0, 1801.0) == 3601.0
    assert time.later(2000.0, 1.0) == 3601.0
    assert time.later(2000.0, 0.0) == 2000.0
    assert time.between(1000.0, 4000.0) == 1200.0
    assert time.between(2000.0, 3000.0) == 0.0


def test_open_time_of_an_engine_that_is_always_open_is_time() -> None:
    time = OpenTime(ALWAYS, 77.0)
    assert (time.later(3.0, 4.0), time.between(3.0, 8.0)) == (7.0, 5.0)


def test_work_that_no_hours_in_sight_can_do_is_never_done() -> None:
    assert OpenTime(HALF_HOURS, 0.0).later(0.0, 1e12) == inf


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6).map(lambda seconds: 1.8e9 + seconds))
def test_between_undoes_later(start: float, seconds: float, now: float) -> None:
    time = OpenTime(WEEKNIGHTS, now)
    assert time.between(start, time.later(start, seconds)) == pytest.approx(seconds, abs=1e-3)
