"""Request bodies from Jinja2 templates that clients write. Pure; imports nothing of Batchyard.

Jinja2's sandbox keeps a template from the interpreter, not from its time and memory. So it is only
parsed by :func:`check_template`, which evaluates nothing, and rendered in processes with limits:
those of datasets by :mod:`batchyard.datasets.render`, those of chains by this file
(:func:`answers`).

The process is sent the source first, and then groups, each a list of the variables of one body
each. A group is answered in JSON with a part for each of its first bodies, ``{"body": {…}}`` or
``{"error": "…"}``, with the ``cpu_seconds`` since the part before: until the group's bodies have
:data:`GROUP_BYTES` or took :data:`GROUP_CPU_SECONDS`. A line that takes too much processor time or
memory is an error that ``is_slow``; one that cannot be interrupted ends the process.
"""

from __future__ import annotations

import base64
import signal
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TEMPLATE_CHARS: Final = 65_536
MAX_BODY_BYTES: Final = 16 * 1024**2
GROUP_BYTES: Final = 32 * 1024**2
"""The bytes of bodies after which the rest of a group is left for the next one. They are in the
memory of the process that holds the batches of all tenants."""
GROUP_CPU_SECONDS: Final = 1.0
"""After so many, too: other tenants wait for their turns meanwhile."""
MAX_BODY_DEPTH: Final = 63
"""The depth of :mod:`batchyard.lines.json_depth`, in a line, which is one level more."""
CPU_SECONDS: Final = 2.0
"""For one body. An honest one takes less than a millisecond."""
_MOST_CPU_SECONDS: Final = 5.0
"""After so many the kernel ends the process, whatever it is in. Seconds of the clock would end
honest bodies on a busy machine, where they wait for their turn."""
_SHOWN_CHARS: Final = 200
_TOO_LARGE: Final = "what it makes is too large"
_IN_BLOCKS: Final = ("loop", "caller", "varargs", "kwargs", "self")

_decode = msgspec.json.Decoder().decode
_decode_group = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder(decimal_format="string").encode


class TemplateRefused(ValueError):
    """The text is no template, or asks for what there is not."""


class BodyNotMade(ValueError):
    """The template makes no body of these variables."""


def new_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with our filters ``tojson`` and ``base64``."""
    from jinja2 import StrictUndefined  # noqa: PLC0415 - few batches have a template
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - see above

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, finalize=_no_binary, cache_size=0
    )
    # Jinja2's own sorts keys, writes HTML's escapes, and marks its text as HTML.
    environment.filters |= {"tojson": _to_json, "base64": _to_base64}
    return environment


def check_template(source: str, variables: Collection[str] | None = None) -> None:
    """Raise :class:`TemplateRefused` for what cannot be rendered.

    ``variables``: all that there will be; None: that is not known. Nothing of the template is run.
    """
    from jinja2 import TemplateSyntaxError, nodes  # noqa: PLC0415 - see above

    if len(source) > MOST_TEMPLATE_CHARS:
        raise TemplateRefused(f"it has more than {MOST_TEMPLATE_CHARS} characters")
    environment = new_environment()
    elsewhere = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    try:
        tree = environment.parse(source)
        names = list(tree.find_all(nodes.Name))
        macros = {each.name for each in tree.find_all(nodes.Macro)}
        takes_others = next(tree.find_all(elsewhere), None) is not None
    except TemplateSyntaxError as error:
        words = str(error.message)[:_SHOWN_CHARS]
        raise TemplateRefused(f"in its line {error.lineno}, {words}") from None
    except (RecursionError, ValueError):
        # A number of thousands of digits is the latter.
        raise TemplateRefused("it is nested too deeply, or has too long a number") from None
    if takes_others:
        raise TemplateRefused("it may not include, import or extend another template")
    if variables is None:
        return
    known = {each.name for each in names if each.ctx != "load"}
    known |= {*variables, *macros, *environment.globals, *_IN_BLOCKS}
    unknown = sorted({each.name for each in names} - known)
    if unknown:
        offered = ", ".join(sorted(variables))
        raise TemplateRefused(f"'{unknown[0]}' is not one of its variables, which are: {offered}")


def _to_json(value: Any, indent: int | None = None) -> str:
    """Times in ISO 8601, decimals as text, bytes in base64, NaN as null."""
    _check_defined(value)
    found = _encode(value)
    return (found if indent is None else msgspec.json.format(found, indent=indent)).decode()


def _to_base64(value: Any) -> str:
    _check_defined(value)
    data = value.encode() if isinstance(value, str) else value
    return base64.b64encode(data).decode()


def _check_defined(value: Any) -> None:
    from jinja2 import Undefined  # noqa: PLC0415 - see above

    if isinstance(value, Undefined):
        str(value)  # raises, with the name


def _no_binary(value: Any) -> Any:
    from jinja2 import TemplateRuntimeError  # noqa: PLC0415 - see above

    if isinstance(value, bytes):
        raise TemplateRuntimeError("a binary value has no text: use the filter base64 or tojson")
    return value


class BodyTemplate:
    """A template of a JSON object. Compiling and rendering it takes as long as its author likes."""

    def __init__(self, source: str) -> None:
        from jinja2 import TemplateError  # noqa: PLC0415 - see above

        try:
            self._template = new_environment().from_string(source)
        except TemplateError as error:
            raise TemplateRefused(str(error.message or error)) from None

    def render(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The body. Raises :class:`BodyNotMade`, and ``MemoryError``."""
        try:
            text = self._text(variables)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a client's template does
            raise BodyNotMade(f"{type(error).__name__}: {error}"[:500]) from None
        if len(text) > MAX_BODY_BYTES:
            raise BodyNotMade(_TOO_LARGE)
        try:
            body = _decode(text)
        except (ValueError, RecursionError) as error:
            raise BodyNotMade(f"what it makes is not JSON: {error}"[:500]) from None
        if not isinstance(body, dict):
            raise BodyNotMade("what it makes is not a JSON object")
        if _is_deep(body):
            # Readers with more calls under way give up at less depth.
            raise BodyNotMade(f"what it makes is nested deeper than {MAX_BODY_DEPTH} levels")
        return body

    def _text(self, variables: Mapping[str, Any]) -> str:
        """What it makes, or the beginning of it that is too large."""
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                break
        return "".join(pieces)


def _is_deep(body: dict[str, Any]) -> bool:
    level: list[Any] = [body]
    for _ in range(MAX_BODY_DEPTH):
        values = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for some in values for value in some if isinstance(value, dict | list)]
    return bool(level)


# -- the process ----------------------------------------------------------------------------------


def answers(requests: Iterator[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The parts of each group's answer, with whether one is the last."""
    signal.signal(signal.SIGVTALRM, _interrupt)
    # Not handled: a handler would wait for the end of what cannot be interrupted.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    lines = _Lines(next(requests).decode())
    for group in map(_decode_group, requests):
        size_bytes, began = 0, time.process_time()
        for number, variables in enumerate(group, 1):
            made = lines.answer(_decode(variables))
            size_bytes += len(made)
            is_full = size_bytes >= GROUP_BYTES or _is_over(began)
            yield number == len(group) or is_full, made
            if is_full:
                break


def _is_over(began: float) -> bool:
    return time.process_time() - began >= GROUP_CPU_SECONDS


class _Lines:
    """The lines of one template, each under limits of its own."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._template: BodyTemplate | None = None
        # Jinja2 is imported now: no line's time is spent on it.
        new_environment()
        self._counted_until = time.process_time()

    def answer(self, variables: Mapping[str, Any]) -> bytes:
        """The body of these, or why there is none."""
        try:
            _bound(CPU_SECONDS, _MOST_CPU_SECONDS)
            if self._template is None:
                self._template = BodyTemplate(self._source)
            made = self._answer(body=self._template.render(variables))
            if len(made) > MAX_BODY_BYTES:
                # Its text was not: a number or a character may take more bytes than it had.
                made = self._answer(error=_TOO_LARGE)
        except _TookTooLong:
            made = self._answer(error="it takes too long", is_slow=True)
        except MemoryError:
            made = self._answer(error="it takes too much memory", is_slow=True)
        except Exception as error:  # noqa: BLE001 - whatever a client's template does
            # Its text may have half of a character, which the template has made.
            words = str(error).encode(errors="backslashreplace").decode()
            made = self._answer(error=words[:500])
        finally:
            _bound(0, 0)
        return made

    def _answer(self, **answer: Any) -> bytes:
        now = time.process_time()
        made = msgspec.json.encode(answer | {"cpu_seconds": now - self._counted_until})
        self._counted_until = now
        return made


class _TookTooLong(BaseException):
    """No ``Exception``, so that no template catches it."""


def _interrupt(*_: object) -> NoReturn:
    raise _TookTooLong


def _bound(cpu_seconds: float, most_cpu_seconds: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    signal.setitimer(signal.ITIMER_PROF, most_cpu_seconds)
