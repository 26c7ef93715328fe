"""Events are logged by name, in text or JSON, and every name is explained."""

from __future__ import annotations

import ast
import json
import logging
import logging.config
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.logs import Event, event_logger
from batchyard.logs.rotation import KEPT, rotate
from batchyard.logs.setup import formatter_for, prefect_variables
from batchyard.logs.vocabulary import EVENTS, FIELDS
from reference.logs_page import uses

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_EVENTS = {
    "batchyard/logs/__init__.py",
    "batchyard/cli/__init__.py",  # keeps a library's messages off the terminal
    "batchyard/storage/hub_client.py",  # keeps signed URLs out of libraries' messages
    "batchyard/cli/terminal/progress.py",  # shows the product's warnings on the terminal
    "commands/foreground.py",  # keeps libraries' warnings off the terminal
    "commands/prefect_worker/flow_run.py",  # removes the handlers that Prefect adds again
    "flows/process/worker.py",  # sets the level
}
"""The modules that may ask the standard library for a logger."""


def record_of(event: Event, **attributes: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "batchyard.x", "levelname": "WARNING", "msg": event, **attributes}
    )


def as_json(event: Event, **attributes: object) -> dict[str, object]:
    line = formatter_for("json").format(record_of(event, **attributes))
    assert "\n" not in line
    return dict(json.loads(line))


def test_an_event_as_text_has_its_name_its_fields_and_its_sentence() -> None:
    event = Event("chunk.failed", {"batch": "b", "chunk": 3}, "100 % of it")
    assert record_of(event).getMessage() == "chunk.failed batch=b chunk=3 100 % of it"


def test_an_event_as_text_is_one_line_whatever_a_client_has_written() -> None:
    event = Event("api.client_left", {"path": "/v1/x\nERROR login.failed"}, "\x1b[2J caf\xe9\u2028")
    message = record_of(event).getMessage()
    assert message == r"api.client_left path=/v1/x\nERROR login.failed \x1b[2J café\u2028"


def test_an_event_as_json_has_its_fields_as_values() -> None:
    entry = as_json(Event("chunk.failed", {"batch": "b", "chunk": 3}, "why"))
    del entry["time"]
    assert entry == {
        "level": "warning",
        "logger": "batchyard.x",
        "event": "chunk.failed",
        "message": "why",
        "batch": "b",
        "chunk": 3,
    }


def test_a_field_never_replaces_what_each_record_has() -> None:
    entry = as_json(Event("delivery.attempted", {"event": "batch.completed", "level": 2}, ""))
    assert (entry["event"], entry["event_"]) == ("delivery.attempted", "batch.completed")
    assert (entry["level"], entry["level_"]) == ("warning", 2)


def test_a_value_that_json_does_not_know_is_text() -> None:
    assert as_json(Event("engine.ready", {"log": Path("/a")}, ""))["log"] == "/a"


def test_a_record_of_a_flow_run_says_which() -> None:
    assert as_json(Event("chunk.lost", {}, ""), flow_run_id="f")["flow_run"] == "f"


def test_an_exception_is_one_value_of_its_line() -> None:
    error = ValueError("of no use")
    entry = as_json(Event("api.failed", {}, ""), exc_info=(ValueError, error, None))
    assert "ValueError: of no use" in str(entry["traceback"])


def test_below_the_level_nothing_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import logging.config, sys
from batchyard.logs import event_logger
from batchyard.logs.setup import logging_config
logging.config.dictConfig(logging_config("json", "WARNING"))
log = event_logger("batchyard.x")
log.info("engine.ready")
log.warning("chunk.lost", "another has it")
logging.getLogger("library").warning("100 %s", "words")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(each.get("event"), each["message"]) for each in said] == [
        ("chunk.lost", "another has it"),
        (None, "100 words"),
    ]


def test_events_of_flows_are_below_the_logger_that_prefect_hands_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    event_logger("flows.process.worker").warning("flow_run.uses")
    assert caplog.records[0].name == "batchyard.flows.process.worker"


def test_a_caller_is_named_and_not_the_event_logger(caplog: pytest.LogCaptureFixture) -> None:
    event_logger("batchyard.x").warning("chunk.lost")
    assert caplog.records[0].filename == Path(__file__).name


def test_prefects_processes_write_the_same_json() -> None:
    program = """
import logging
from prefect.logging.configuration import setup_logging
from batchyard.logs import event_logger
setup_logging()
event_logger("batchyard.x").warning("chunk.lost", "a long sentence " * 20, batch="b")
logging.getLogger("prefect.x").error("[bold]done[/bold]")
"""
    without_prefect = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=without_prefect | prefect_variables("json"),
    )
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(each.get("event"), each.get("batch")) for each in said] == [
        ("chunk.lost", "b"),
        (None, None),
    ]
    assert said[1]["message"] == "[bold]done[/bold]"


def test_every_event_and_every_field_of_the_code_is_explained_and_no_other() -> None:
    found = uses()
    assert found.keys() == EVENTS.keys()
    assert {name for use in found.values() for name in use.fields} == FIELDS.keys()


def test_everything_is_logged_as_an_event() -> None:
    for folder in ("batchyard", "blocks", "commands", "flows", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name not in WITHOUT_EVENTS:
                assert "getLogger" not in names_in(ast.parse(path.read_text())), name


def names_in(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_a_log_of_a_running_process_is_begun_anew_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    with path.open("a", buffering=1) as log:
        for number in range(KEPT + 2):
            log.write(f"{number}\n")
            rotate(path, max_bytes=2)
        log.write("last\n")
    texts = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert texts == {
        "api.log": "last\n",
        "api.log.1": "4\n",
        "api.log.2": "3\n",
        "api.log.3": "2\n",
    }
    assert {each.stat().st_mode & 0o077 for each in tmp_path.glob("*.log.*")} == {0}


def test_a_small_log_and_one_that_is_not_there_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    rotate(path, max_bytes=2)
    path.write_text("1")
    rotate(path, max_bytes=2)
    assert [each.name for each in tmp_path.iterdir()] == ["api.log"]
