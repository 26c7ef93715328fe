"""A program: adds two endpoints to the table, then says which readers of the table know them.

In a process of its own, and with imports inside the functions, because most readers look at the
table when they are imported. Each function here is one reader; a new reader gets a function.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING, Any

from batchyard.lines.endpoints import ENDPOINTS, Endpoint, Repeats

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.lines.lines import Validator

NEW, OWN = "/v1/summaries", "/v1/songs"
_ROWS = {
    NEW: Endpoint(
        (("input", "length"),),
        Repeats.SAME,
        prompt=("length", "input"),
        writes_tokens=True,
        file_field="attachment",
        limits_inputs=True,
    ),
    OWN: Endpoint((("file_url",),), Repeats.OWN, file_field="score"),
}


def _line(**body: Any) -> bytes:
    line = {"custom_id": "a", "method": "POST", "url": NEW, "body": {"model": "m", **body}}
    return json.dumps(line).encode()


def _refused(validator: Validator, line: bytes) -> str | None:
    """The parameter that is wrong with the line."""
    from batchyard.errors import InputRefused  # noqa: PLC0415 - see above

    file = io.BytesIO(line)
    list(validator.lines(file))
    try:
        validator.finish(file)
    except InputRefused as refused:
        return refused.entries[0].param
    return None


def validation_asks_for_its_fields() -> bool:
    from batchyard.lines.lines import Validator  # noqa: PLC0415 - see above
    from batchyard.lines.rules import Rules  # noqa: PLC0415 - see above

    return _refused(Validator(Rules(None)), _line(input="x")) == "body.length"


def validation_counts_its_inputs() -> bool:
    from batchyard.lines.lines import Validator  # noqa: PLC0415 - see above
    from batchyard.lines.rules import Limits, Rules  # noqa: PLC0415 - see above

    strict = Validator(Rules(None, limits=Limits(max_embedding_inputs=1)))
    return _refused(strict, _line(input=["x", "y"], length=1)) == "body.input"


def validation_checks_its_file_url() -> bool:
    from batchyard.lines.lines import Validator  # noqa: PLC0415 - see above
    from batchyard.lines.rules import Rules  # noqa: PLC0415 - see above

    line = _line(input="x", length=1, file_url="ftp://example.com")
    return _refused(Validator(Rules(None)), line) == "body.file_url"


def planning_renders_its_prompt() -> bool:
    from batchyard.lines.prompt import prompt_key  # noqa: PLC0415 - see above

    return prompt_key(NEW, {"input": "text", "length": "short"})[0].endswith(b"\0shorttext")


def planning_expects_its_output() -> bool:
    from batchyard.lines.prompt import expected_output_tokens  # noqa: PLC0415 - see above

    bound = {"max_tokens": 7}
    return (expected_output_tokens(NEW, bound), expected_output_tokens(OWN, bound)) == (7, 0)


def deduplication_shares_its_answers() -> bool:
    from batchyard.plan.duplicates import NO_DIGEST, answer_digest  # noqa: PLC0415 - see above

    return answer_digest(NEW, {}) != NO_DIGEST == answer_digest(OWN, {})


def forms_have_its_file() -> bool:
    from batchyard.lines.forms import AttachedFile, make_form  # noqa: PLC0415 - see above

    return b'name="attachment"' in make_form(NEW, {}, AttachedFile("a", "text/plain", b"")).body


def the_runner_reads_its_lines() -> bool:
    from batchyard.runner.chunk.line_reader import UnreadableLine, read_envelope  # noqa: PLC0415 - see above

    line = _line()
    with tempfile.TemporaryFile() as file:
        file.write(line)
        file.flush()
        read = read_envelope(file.fileno(), {"length": len(line), "offset": 0, "ordinal": 0})
    return not isinstance(read, UnreadableLine)


def the_window_asks_whether_it_is_served() -> bool:
    from batchyard.runner.window.missing_endpoints import missing_endpoints  # noqa: PLC0415 - see above

    return missing_endpoints({"/v1/chat/completions": None}) >= {NEW, OWN}


def the_stub_answers_it() -> bool:
    from batchyard.engine.stub.stub_answers import answer_to  # noqa: PLC0415 - see above

    status, answer = answer_to({"m"}, NEW, _line()[_line().index(b'{"model') : -1])
    return (status, json.loads(answer)["model"]) == (200, "m")


def the_stub_asks_for_the_form_of_a_file() -> bool:
    from batchyard.engine.stub.stub_answers import answer_to  # noqa: PLC0415 - see above

    return answer_to({"m"}, OWN, b'{"model": "m"}')[0] == 400


def a_batch_may_name_it() -> bool:
    """What is wrong with this one is found after its endpoint."""
    from batchyard.errors import RequestRefused  # noqa: PLC0415 - see above
    from batchyard.steps.create.create import BatchRequest, accept_batch  # noqa: PLC0415 - see above

    no_services: Any = None
    request = BatchRequest(endpoint=NEW, metadata={"": "x" * 1000}, input_file_id="file-1")
    try:
        asyncio.run(accept_batch(no_services, request))
    except RequestRefused as refused:
        return str(refused.param).startswith("metadata")
    return False


def the_apis_description_lists_it() -> bool:
    from batchyard.server import create_app  # noqa: PLC0415 - see above

    return NEW in json.dumps(create_app().openapi())


def the_deployments_form_lists_it() -> bool:
    from flows.submit_batch import submit_batch  # noqa: PLC0415 - see above

    return NEW in json.dumps(submit_batch.parameters.model_dump(mode="json"))


READERS: list[Callable[[], bool]] = [
    validation_asks_for_its_fields,
    validation_counts_its_inputs,
    validation_checks_its_file_url,
    planning_renders_its_prompt,
    planning_expects_its_output,
    deduplication_shares_its_answers,
    forms_have_its_file,
    the_runner_reads_its_lines,
    the_window_asks_whether_it_is_served,
    the_stub_answers_it,
    the_stub_asks_for_the_form_of_a_file,
    a_batch_may_name_it,
    the_apis_description_lists_it,
    the_deployments_form_lists_it,
]


def main() -> None:
    ENDPOINTS.update(_ROWS)
    knows = {}
    for reader in READERS:
        try:
            knows[reader.__name__] = reader()
        except Exception:  # noqa: BLE001 - a reader that fails does not know the endpoint
            traceback.print_exc()
    sys.stdout.write(json.dumps(knows))


if __name__ == "__main__":
    main()
