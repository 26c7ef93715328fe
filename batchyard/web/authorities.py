"""The certificate authorities that Batchyard trusts when it connects to other servers."""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@lru_cache(maxsize=16)
def context_trusting(ca_file: Path | None) -> ssl.SSLContext | None:
    """A TLS context that trusts the authorities in the PEM file, and no others.

    None stands for the default of each library: the system's authorities. The file is read once.
    Raises ``OSError`` (:class:`ssl.SSLError` included) if it cannot be read or has no certificate.
    """
    return None if ca_file is None else ssl.create_default_context(cafile=ca_file)
