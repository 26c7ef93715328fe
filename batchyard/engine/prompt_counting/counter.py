"""A process of the engine's environment that counts tokens, seen from our side.

``script.py`` is the other one. The counter is used in a thread without an event loop, and has one
of its own. Whatever happens to the process (it is not there, it hangs, it dies of one request)
costs counts and nothing else: a request that it cannot count has none, and after a few such deaths
no further one is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from batchyard.engine.vllm.vllm_options import (
    CUDA_SMALL,
    EngineOptions,
    engine_environment,
    structured_backend,
)
from batchyard.lines.body_policy import Refusal
from batchyard.processes.beside import beside
from batchyard.processes.child_loop import Limits
from batchyard.processes.child_program import ChildProgram, ProgramEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

T = TypeVar("T")

COUNTED_ENDPOINTS: Final = frozenset(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "embeddings", "messages", "responses")
)
"""The endpoints of whose bodies ``script.py`` knows the prompts."""
SCRIPT: Final = Path(__file__).with_name("script.py")
_START_SECONDS: Final = 180.0
_ANSWER_SECONDS: Final = 60.0
_MOST_DEATHS: Final = 4
_QUICK_SECONDS: Final = 2.0
_SLOW_SECONDS: Final = 300.0
"""For all answers of one input together, beyond what a quick one takes."""
_POLL_SECONDS: Final = 0.2
_LIMITS: Final = Limits(data_bytes=6 * 1024**3)
"""A text of 32 MiB takes one."""
_DOUBTFUL_CONTEXT: Final = (
    *("hf-overrides", "hf-config-path", "config-format", "pooler-config", "override-pooler-config"),
    *("disable-sliding-window", "rope-scaling", "rope-parameters", "rope-theta"),
)
"""Options by which vLLM may take another length of the context than config.json has."""


@dataclass(frozen=True, slots=True)
class CounterProgram:
    """How the counter of one engine's prompts is started: a Python that has vLLM, and for what."""

    python: Path
    environment: Mapping[str, str] = field(repr=False)
    setup: Mapping[str, Any]
    """What ``script.py`` must know of the engine's options."""


def counter_program(
    python: Path, weights: str, options: EngineOptions, own_environment: Mapping[str, str]
) -> CounterProgram:
    """The counter of an engine with these options. It sees no GPU and loads nothing."""
    # The options of the profile are for an engine; nothing is computed here.
    environment = engine_environment(
        os.environ,
        own_environment,
        weights=weights,
        options=options,
        profile=CUDA_SMALL,
        python_path=SCRIPT.parent,
    )
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "RAYON_NUM_THREADS": "2",
    }
    return CounterProgram(python, environment, _setup(weights, options))


def _setup(weights: str, options: EngineOptions) -> dict[str, Any]:
    length = options.number("max-model-len")
    is_doubtful = any(name in options for name in _DOUBTFUL_CONTEXT)
    return {
        "model": options.value("model") or weights,
        "revision": options.value("revision"),
        "tokenizer": options.value("tokenizer"),
        "tokenizer_revision": options.value("tokenizer-revision"),
        "tokenizer_mode": options.value("tokenizer-mode"),
        "trust_remote_code": options.value("trust-remote-code") is not None,
        "max_model_len": None if "pooler-config" in options else length,
        # A length that is given and no number lets vLLM choose one.
        "is_context_doubtful": is_doubtful or ("max-model-len" in options and length is None),
        "chat_template": options.value("chat-template"),
        "content_format": options.value("chat-template-content-format"),
        "template_kwargs": options.object("default-chat-template-kwargs"),
        "has_tool_parser": "enable-auto-tool-choice" in options and "tool-call-parser" in options,
        "max_logprobs": options.number("max-logprobs") or 20,
        "structured_backend": structured_backend(weights, options),
    }


class CountedRequest(msgspec.Struct, array_like=True):
    """What the counter is asked about one line."""

    url: str
    body: dict[str, Any]


class Count(msgspec.Struct, array_like=True, frozen=True):
    """What is known of one line.

    ``tokens`` are in all its prompts together, ``longest`` in the longest one, at least: only if
    ``is_exact``, not more. None: not known. ``refusals``: why the engine refuses the request, and
    which fields it ignores; None: it was not asked, or did not say.
    """

    tokens: int | None = None
    longest: int | None = None
    is_exact: bool = False
    refusals: tuple[Refusal, ...] | None = None


class _Began(msgspec.Struct):
    """The answer to the setup."""

    max_model_len: int | None = None
    error: str = ""


_UNKNOWN: Final = Count()
_decode_counts = msgspec.json.Decoder(list[Count]).decode


class PromptCounter:
    """The counter of one engine's prompts. Use as a context manager, which ends its process.

    ``go_on`` is called while it is waited for, and may raise :class:`InterruptedError`.
    """

    def __init__(self, program: CounterProgram, go_on: Callable[[], object]) -> None:
        self._program = program
        self._go_on = go_on
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._process: ChildProgram | None = None
        self._deaths = 0
        self._slow_seconds = 0.0
        self._sent: Sequence[CountedRequest] = ()
        self.why_not = ""
        """Why it counts nothing (any more); empty while it counts."""
        self.max_model_len: int | None = None
        """The length of the engine's context; None: not known for certain."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._runner.close()

    def send(self, requests: Sequence[CountedRequest]) -> None:
        """Have them counted, while the caller does something else. :meth:`receive` comes next."""
        self._sent = requests
        if self._process is not None:
            with contextlib.suppress(ProgramEnded, TimeoutError):
                self._wait(self._process.send(msgspec.json.encode(requests)), _ANSWER_SECONDS)

    def receive(self) -> list[Count]:
        """The counts of what was sent, one for each."""
        sent, self._sent = self._sent, ()
        if self._process is None:
            return [_UNKNOWN] * len(sent)
        began = time.monotonic()
        try:
            counts = _decode_counts(self._wait(self._process.receive(), _ANSWER_SECONDS).data)
        except (ProgramEnded, TimeoutError, msgspec.DecodeError):
            self._restart()
            return [_UNKNOWN] if len(sent) == 1 else self._one_by_one(sent)
        self._note_time(time.monotonic() - began)
        return counts

    def _note_time(self, seconds: float) -> None:
        self._slow_seconds += max(0.0, seconds - _QUICK_SECONDS)
        if self._slow_seconds > _SLOW_SECONDS:
            self._stop_for_good("its requests take too long to count")

    def _one_by_one(self, requests: Sequence[CountedRequest]) -> list[Count]:
        """After a death by one of them, so that the others are counted."""
        counts = []
        for each in requests:
            self.send([each])
            counts += self.receive()
        return counts

    # -- the process ------------------------------------------------------------------------

    def _start(self) -> None:
        python = self._program.python
        try:
            began = self._wait(self._began(), _START_SECONDS)
        except InterruptedError:
            self.__exit__()
            raise
        except (OSError, ValueError, ProgramEnded) as error:
            reason = (isinstance(error, OSError) and error.strerror) or "it ended"
            self._stop_for_good(f"{python} could not load the tokenizer ({reason})")
            return
        self.max_model_len = began.max_model_len
        if began.error:
            self._stop_for_good(f"its tokenizer could not be loaded ({began.error})")

    async def _began(self) -> _Began:
        program = self._program
        self._process = await ChildProgram.start(
            SCRIPT, _LIMITS, environment=program.environment, python=program.python, options=()
        )
        answer = await self._process.ask(msgspec.json.encode(program.setup))
        return msgspec.json.decode(answer, type=_Began)

    def _restart(self) -> None:
        self._kill()
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS:
            self._stop_for_good("too many requests ended the process that counts them")
        else:
            known = self.max_model_len
            self._start()
            self.max_model_len = self.max_model_len or known

    def _stop_for_good(self, why_not: str) -> None:
        self._kill()
        self.why_not = why_not

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._runner.run(process.end())

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Raises ``TimeoutError``, and what the work and ``go_on`` raise."""
        return self._runner.run(self._bounded(work, seconds))

    async def _bounded(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        async with beside(work) as task:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait([task], timeout=_POLL_SECONDS))[0]:
                    self._go_on()
            return task.result()
