"""What is read from vLLM's log; the lines are those of vLLM 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import StartProgress
from batchyard.engine.vllm.engine_log import MAX_CAUSE_LINES, LogTail, cause_of, progress_of

if TYPE_CHECKING:
    from pathlib import Path

CORE = "(EngineCore pid=5228) ERROR 11-20 15:40:37 [core.py:1205] "
SERVER = "(APIServer pid=5153) "

OUT_OF_MEMORY = f"""\
(APIServer pid=5153) INFO 11-20 15:40:23 [api_utils.py:286] non-default args: {{'model': 'm'}}
(APIServer pid=5153) WARNING 11-20 15:40:23 [system_utils.py:255] failed with OSError: error: x
{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "/vllm/v1/engine/core.py", line 1196, in run_engine_core
{CORE}    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
{CORE}                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of
(EngineCore pid=5228) Process EngineCore:
(EngineCore pid=5228) Traceback (most recent call last):
(EngineCore pid=5228)   File "/vllm/v1/engine/core.py", line 1209, in run_engine_core
(EngineCore pid=5228)     raise e
(EngineCore pid=5228) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0
{SERVER}Traceback (most recent call last):
{SERVER}  File "/vllm/entrypoints/launchers/api_server/entry.py", line 236, in <module>
{SERVER}    main()
{SERVER}RuntimeError: Engine core initialization failed. See root cause above.
"""

BAD_CONFIG = """\
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "/vllm/engine/arg_utils.py", line 1, in create_model_config
(APIServer pid=1)     return ModelConfig(
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=1)   Value error, User-specified max_model_len (9) is greater than the derived 8.
(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


def test_the_cause_is_what_happened_below_not_what_the_server_says_of_it() -> None:
    """The general last line is left out, as are warnings that mention errors."""
    cause = cause_of(OUT_OF_MEMORY.splitlines())

    assert cause[0].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert not any("See root cause above" in line or "non-default" in line for line in cause)


def test_a_message_of_several_lines_is_kept_whole() -> None:
    """Pydantic puts the point on the second line."""
    assert cause_of(BAD_CONFIG.splitlines()) == [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (9) is greater than the derived 8.",
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error",
    ]


def test_a_bad_option_is_the_cause() -> None:
    """argparse prints its usage first."""
    lines = [
        "usage: api_server.py [-h]",
        "  [--x]",
        "api_server.py: error: unrecognized arguments: --y",
    ]

    assert cause_of(lines) == ["api_server.py: error: unrecognized arguments: --y"]


def test_without_any_exception_the_end_of_the_log_must_do() -> None:
    """Capped in lines and in characters."""
    cause = cause_of([f"line {number} " + "x" * 1000 for number in range(100)])

    assert len(cause) == MAX_CAUSE_LINES
    assert cause[-1].startswith("line 99 ")
    assert max(map(len, cause)) == 500


def test_an_empty_log_has_no_cause() -> None:
    """It does not fail on it."""
    assert cause_of([]) == []


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("[model.py:733] Resolved architecture: Llama", StartProgress("starting the engine")),
        ("Starting to load model /m...", StartProgress("loading weights")),
        (
            "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<?, ?it/s]",
            StartProgress("loading weights 1/4", 0.25),
        ),
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|██ | 4/8 [00:01<",
            StartProgress("capturing CUDA graphs 4/8", 0.5),
        ),
        ("CPU KV cache size: 2,097,152 tokens", StartProgress("warming up")),
        ("Starting vLLM server on unix:/s", StartProgress("starting the server")),
        ("Route: /v1/models, Methods: GET", None),
    ],
)
def test_known_lines_are_progress(line: str, progress: StartProgress | None) -> None:
    """With a fraction where the line has one."""
    assert progress_of(line) == progress


def test_the_tail_yields_each_line_once(tmp_path: Path) -> None:
    """Progress bars redraw with a carriage return; an unfinished line waits."""
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = LogTail(path, start=4)
    with path.open("a") as log:
        log.write("one\n\rtwo 50%\rtwo 100%\nthr")
        log.flush()
        assert tail.new_lines() == ["one", "two 50%", "two 100%"]
        log.write("ee")
        log.flush()
        assert tail.new_lines() == []
        assert tail.rest() == ["three"]
    assert tail.rest() == []
