"""A program: adds two options of a batch to the table, then says what each way in makes of them.

In a process of its own, because every way in reads the table when it is imported.
"""

from __future__ import annotations

import json
from typing import Any

from batchyard.batch import batch_options
from batchyard.batch.batch_options import EVERYWHERE, BatchOption, DeliveryKind, Door, Value

SONG = BatchOption(
    name="favourite_song",
    value=Value.TEXT,
    doors=EVERYWHERE | {Door.ESTIMATE},
    words="For a command.",
    other_words={Door.BODY: "For a body.", Door.FORM: "For a form."},
)
RECEIVER = BatchOption(
    name="song_url",
    value=Value.URL,
    doors=EVERYWHERE - {Door.FORM},
    words="A receiver.",
    told_by=DeliveryKind.FILE,  # any that no other option has
)


def on_a_command_line(name: str) -> dict[str, Any]:
    import typer  # noqa: PLC0415 - see above

    from batchyard.cli import make_app  # noqa: PLC0415 - see above

    command: Any = typer.main.get_command(make_app())
    command = command.commands[name]
    words = ["-i", "a", "-o", "b", "--favourite-song", "x", "--song-url", "https://a.example"]
    given = command.make_context(name, words).params
    helps = {each.name: each.help for each in command.params}
    return {each.name: [given[each.name], helps[each.name]] for each in (SONG, RECEIVER)}


def in_an_estimate() -> list[str]:
    import typer  # noqa: PLC0415 - see above

    from batchyard.cli import make_app  # noqa: PLC0415 - see above

    command: Any = typer.main.get_command(make_app())
    names = {each.name for each in command.commands["estimate"].params}
    return [each.name for each in _BOTH if each.name in names]


def in_a_body() -> dict[str, Any]:
    from batchyard.api.batches.batch_body import CreateBatch  # noqa: PLC0415 - see above

    properties = CreateBatch.model_json_schema()["properties"]
    given = {SONG.name: "x", RECEIVER.name: "https://a.example"}
    body = {"input_file_id": "f", "endpoint": "e", "completion_window": "24h", **given}
    read = CreateBatch.model_validate(body).model_dump()
    return {each.name: [read[each.name], properties[each.name]["description"]] for each in _BOTH}


def in_the_form() -> dict[str, Any]:
    from flows.submit_batch import submit_batch  # noqa: PLC0415 - see above

    return {
        name: [each["default"], each["description"]]
        for name, each in submit_batch.parameters.properties.items()
        if name in {SONG.name, RECEIVER.name}
    }


def objects_in_the_form() -> dict[str, Any]:
    from flows.submit_batch import submit_batch  # noqa: PLC0415 - see above

    properties = submit_batch.parameters.properties
    return {
        each.name: [properties[each.name]["type"], properties[each.name]["default"]]
        for each in batch_options.OPTIONS
        if each.value is Value.OBJECT
    }


_BOTH = (SONG, RECEIVER)

if __name__ == "__main__":
    batch_options.OPTIONS += _BOTH  # type: ignore[misc]  # that is what is tried
    batch_options.RECEIVER_OPTIONS[DeliveryKind.FILE] = RECEIVER.name
    found = {
        "submit": on_a_command_line("submit"),
        "run": on_a_command_line("run"),
        "estimate": in_an_estimate(),
        "body": in_a_body(),
        "form": in_the_form(),
        "form_objects": objects_in_the_form(),
        "fields": batch_options.as_fields({"favourite_song": "x", "song_url": "u", "other": None}),
    }
    print(json.dumps(found))  # noqa: T201 - what the test reads
