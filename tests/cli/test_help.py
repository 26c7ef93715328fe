"""Help is for people: every command and option says in a sentence what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from typer.core import TyperArgument, TyperOption

from batchyard.cli import make_command
from batchyard.cli.terminal.metavars import commands_below
from batchyard.cli.terminal.panels import NAMED, PANELS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cli.conftest import Ended

    Run = Callable[..., Ended]

COMMANDS = dict(commands_below(make_command()))
VISIBLE = {path: command for path, command in COMMANDS.items() if not command.hidden}
ALIASES = {"resume": "unpause", "quota": "tenants quota", "email": "tenants email"}
"""Earlier names, for a release."""
WITHOUT_JSON = {
    "run": "its answers are a file, and its other options are vLLM's",
    "results": "its lines are JSON already",
    "ledger": "it prints JSON lines",
    "deliveries show": "it prints JSON already",
    "webhooks show": "it prints JSON already",
    "webhooks update": "it prints JSON already",
    "keys login": "it prints one link",
    "keys revoke": "it prints nothing",
    "webhooks delete": "it prints nothing",
    "up": "it runs until Ctrl-C",
    "serve": "it runs until Ctrl-C",
    "worker": "it runs until Ctrl-C",
    "execute": "it becomes another program",
    "deploy": "it says what it does while it does it",
    "engine-node": "it runs until Ctrl-C",
    "engine install": "it says what it does while it does it",
    "engine tiny-models": "it says what it does while it does it",
    "secrets rotate": "it tells a person what to do next",
    "secrets adopt": "it tells a person what to do next",
    "storage accept": "it asks a person",
}


def parameters() -> Iterator[tuple[str, Any]]:
    for path, command in VISIBLE.items():
        context = command.context_class(command, **command.context_settings)
        yield from ((path, parameter) for parameter in command.get_params(context))


def test_a_command_says_what_it_does() -> None:
    for path, command in VISIBLE.items():
        first = command.help.strip().splitlines()[0]
        assert len(first.split()) >= 3, f"{path}: {first}"
        assert first.endswith((".", ":")), f"{path}: {first}"


def test_an_option_says_what_it_is_for() -> None:
    for path, parameter in parameters():
        words = (parameter.help or "").split()
        assert len(words) >= 3, f"{path} {parameter.name}: {parameter.help}"


def test_no_name_of_an_option_and_no_word_for_its_value_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the width of most terminals."""
    monkeypatch.setenv("COLUMNS", "80")
    root = make_command()
    for path, command in COMMANDS.items():
        root.main([*path.split(), "--help"], prog_name="batchyard", standalone_mode=False)
        shown = capsys.readouterr().out.split()
        context = command.context_class(command)
        for each in command.get_params(context):
            names = [] if isinstance(each, TyperArgument) else [*each.opts, *each.secondary_opts]
            for word in (*names, *(each.display_type_rich(context) or "").split()):
                assert {word, f"{word},"} & {*shown}, f"{path}: {word}"


def test_no_help_has_the_name_of_a_python_type() -> None:
    for path, parameter in parameters():
        command = VISIBLE[path]
        shown = parameter.display_type_rich(command.context_class(command)) or ""
        is_choice = parameter.type_descriptor.is_choice
        assert is_choice or "<" not in shown, f"{path} {parameter.name}: {shown}"


def test_every_command_has_its_panel_and_each_panel_its_commands() -> None:
    named = [name for names in PANELS.values() for name in names]
    assert sorted(named) == sorted(path for path in VISIBLE if path and " " not in path)
    assert len(PANELS) == 4


def test_the_list_says_of_a_command_how_its_own_help_begins() -> None:
    """Although it imports none of them."""
    listed = make_command(["--help"]).commands
    for name in NAMED:
        own = VISIBLE[name].help.split("\n\n")[0]
        assert listed[name].short_help == " ".join(own.split())


@pytest.mark.parametrize("words", [["--help"], ["nothing"], ["list", "--help"], ["execute"]])
def test_a_command_line_finds_the_same_commands_with_few_of_them_imported(words: list[str]) -> None:
    few, all_of_them = make_command(words), make_command()
    assert [name for name in all_of_them.commands if name in NAMED] == [
        name for name in few.commands if name in NAMED
    ]
    if words[0] in NAMED:
        told = [each.opts for each in few.commands[words[0]].params]
        assert told == [each.opts for each in all_of_them.commands[words[0]].params]


def test_a_word_that_is_no_command_runs_none(alone: Run) -> None:
    ended = alone("shwo")
    assert ended.status == 2
    assert "No such command 'shwo'" in ended.stderr


def test_an_earlier_name_still_runs_its_command(alone: Run) -> None:
    assert "Continue a paused batch." in alone("resume", "--help").stdout


def test_the_help_has_the_panels_in_the_order_of_a_days_work(alone: Run) -> None:
    shown = alone("--help").stdout
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert "Exit status: 0 done, 1 failed, 2 wrong command line, 3 refused" in shown


def test_every_command_that_prints_for_people_prints_json_too() -> None:
    with_json = {
        path
        for path, command in VISIBLE.items()
        if any(isinstance(each, TyperOption) and "--json" in each.opts for each in command.params)
    }
    leaves = {path for path, command in VISIBLE.items() if not hasattr(command, "commands")}
    assert leaves - with_json == WITHOUT_JSON.keys()


def test_earlier_names_are_hidden_and_do_the_same() -> None:
    hidden = {path: command for path, command in COMMANDS.items() if command.hidden}
    assert hidden.keys() == ALIASES.keys()
    for old, new in ALIASES.items():
        assert hidden[old].callback.__code__ is VISIBLE[new].callback.__code__


def test_arguments_are_in_capitals() -> None:
    for path, parameter in parameters():
        if isinstance(parameter, TyperArgument):
            assert parameter.display_name_raw.isupper(), f"{path} {parameter.display_name_raw}"
