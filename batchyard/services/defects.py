"""A defect of ours that one batch has met ends that batch, with a message that can be reported."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.errors import BatchyardError, UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def defects_as_ours(doing: str) -> Iterator[None]:
    """Raise :class:`~batchyard.errors.UnexpectedError` in place of an unexpected exception.

    ``doing`` completes "Batchyard failed while …". Errors of ours pass, and so do those of the
    machine (:class:`OSError`, :class:`MemoryError`), which say nothing about the batch.
    """
    try:
        yield
    except (BatchyardError, OSError, MemoryError):
        raise
    except Exception as error:
        # Its text may quote the input.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UnexpectedError(
            f"Batchyard failed while {doing}: {type(error).__name__} in "
            f"{Path(where.filename).name}, line {where.lineno}. Please report this defect."
        ) from error
