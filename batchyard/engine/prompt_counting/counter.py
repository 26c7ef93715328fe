"""A process of the engine's environment that counts tokens, seen from our side.

``script.py`` is the other one. The counter is used in one thread, without an event loop. Whatever
happens to the process (it is not there, it hangs, it dies of one request) costs counts and nothing
else: a request that it cannot count has none, and after a few such deaths no further one is tried.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self, cast

import msgspec

from batchyard.engine.vllm.vllm_options import (
    CUDA_SMALL,
    EngineOptions,
    engine_environment,
    structured_backend,
)
from batchyard.lines.body_policy import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COUNTED_ENDPOINTS: Final = frozenset(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "embeddings", "messages", "responses")
)
"""Of whose bodies ``script.py`` knows the prompts."""
SCRIPT: Final = Path(__file__).with_name("script.py")
_START_SECONDS: Final = 180.0
_ANSWER_SECONDS: Final = 60.0
_MOST_DEATHS: Final = 4
_QUICK_SECONDS: Final = 2.0
_SLOW_SECONDS: Final = 300.0
"""For all answers of one input together, beyond what a quick one takes."""
_POLL_SECONDS: Final = 0.2
_PIPE_BYTES: Final = 1 << 16
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


class _Died(Exception):
    """The process has ended, or gave no answer in its time."""


class PromptCounter:
    """The counter of one engine's prompts. Use as a context manager, which ends its process.

    ``go_on`` is called while it is waited for, and may raise :class:`InterruptedError`.
    """

    def __init__(self, program: CounterProgram, go_on: Callable[[], object]) -> None:
        self._program = program
        self._go_on = go_on
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._deaths = 0
        self._slow_seconds = 0.0
        self._sent: Sequence[CountedRequest] = ()
        self._answer_seconds = _ANSWER_SECONDS
        self.why_not = ""
        """Why it counts nothing (any more); empty while it counts."""
        self.max_model_len: int | None = None
        """The length of the engine's context; None: not known for certain."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def send(self, requests: Sequence[CountedRequest]) -> None:
        """Have them counted, while the caller does something else. :meth:`receive` comes next."""
        self._sent = requests
        if self._process is not None:
            with contextlib.suppress(_Died):
                self._write(_line(requests))

    def receive(self) -> list[Count]:
        """The counts of what was sent, one for each."""
        sent, self._sent = self._sent, ()
        if self._process is None:
            return [_UNKNOWN] * len(sent)
        began = time.monotonic()
        try:
            counts = self._counts(len(sent))
        except _Died:
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

    def _counts(self, wanted: int) -> list[Count]:
        try:
            counts = _decode_counts(self._read(self._answer_seconds))
        except msgspec.DecodeError:
            raise _Died from None
        if len(counts) != wanted:
            raise _Died
        return counts

    # -- the process ------------------------------------------------------------------------

    def _start(self) -> None:
        program = self._program
        self._buffer.clear()
        try:
            self._process = subprocess.Popen(
                [program.python, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Libraries might print a prompt there.
                stderr=subprocess.DEVNULL,
                env=dict(program.environment),
                start_new_session=True,
            )
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe.fileno(), False)
            self._write(msgspec.json.encode(program.setup) + b"\n")
            began = msgspec.json.decode(self._read(_START_SECONDS), type=_Began)
            self.max_model_len = began.max_model_len
            if began.error:
                self._stop_for_good(f"its tokenizer could not be loaded ({began.error})")
        except InterruptedError:
            self._kill()
            raise
        except (OSError, ValueError, _Died) as error:
            reason = error.strerror if isinstance(error, OSError) else "it ended"
            self._stop_for_good(f"{program.python} could not load the tokenizer ({reason})")

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
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @property
    def _stdin(self) -> IO[bytes]:
        return cast("IO[bytes]", cast("subprocess.Popen[bytes]", self._process).stdin)

    @property
    def _stdout(self) -> IO[bytes]:
        return cast("IO[bytes]", cast("subprocess.Popen[bytes]", self._process).stdout)

    def _write(self, data: bytes) -> None:
        left, pipe = memoryview(data), self._stdin.fileno()
        deadline = time.monotonic() + self._answer_seconds
        while left:
            self._wait(pipe, selectors.EVENT_WRITE, deadline)
            try:
                left = left[os.write(pipe, left[:_PIPE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise _Died from None

    def _read(self, seconds: float) -> bytes:
        """The next line of its answers."""
        pipe, deadline = self._stdout.fileno(), time.monotonic() + seconds
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            self._wait(pipe, selectors.EVENT_READ, deadline)
            try:
                part = os.read(pipe, _PIPE_BYTES)
            except BlockingIOError:
                continue
            if not part:
                raise _Died
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        with selectors.PollSelector() as selector:
            selector.register(pipe, event)
            while not selector.select(_POLL_SECONDS):
                self._go_on()
                if time.monotonic() > deadline:
                    raise _Died


def _line(requests: Sequence[CountedRequest]) -> bytes:
    return msgspec.json.encode(requests) + b"\n"
