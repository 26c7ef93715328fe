"""The template that makes a request's body of a row.

Jinja2's sandbox keeps a template from the interpreter, not from its time and memory. So here it is
only parsed, which evaluates nothing; what evaluates it is :mod:`batchyard.datasets.render`, in a
process with limits.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import msgspec

from batchyard.errors import RequestRefused

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TEMPLATE_CHARS: Final = 65_536
_SHOWN_CHARS: Final = 200


def check_template(text: str) -> None:
    """Raise :class:`~batchyard.errors.RequestRefused` for what is no Jinja2 template."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415 - few batches have one

    if len(text) > MOST_TEMPLATE_CHARS:
        raise _refused(f"The template may have {MOST_TEMPLATE_CHARS} characters at most.")
    try:
        new_environment().parse(text)
    except TemplateSyntaxError as error:
        words = str(error.message)[:_SHOWN_CHARS]
        raise _refused(f"The template is not valid in line {error.lineno}: {words}") from None
    except (RecursionError, ValueError):
        # A number of thousands of digits is the latter.
        raise _refused("The template is nested too deeply, or has too long a number.") from None


def new_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with our filters ``tojson`` and ``base64``."""
    from jinja2 import StrictUndefined  # noqa: PLC0415 - see above
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - see above

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, finalize=_no_binary, cache_size=0
    )
    # Jinja2's own writes HTML's escapes, and marks its text as HTML.
    environment.filters |= {"tojson": _to_json, "base64": _to_base64}
    return environment


_encode = msgspec.json.Encoder(decimal_format="string").encode


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


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="template", code="invalid_template")
