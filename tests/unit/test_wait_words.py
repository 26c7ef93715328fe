"""Why a batch waits, in words for everybody who may see it."""

from __future__ import annotations

import pytest

from batchyard.errors import (
    AccessDenied,
    BatchyardError,
    DispatchFailed,
    ObjectNotFound,
    StorageFull,
    StorageUnavailable,
    StoreUnavailable,
)
from batchyard.services.story.wait_words import why_it_waits


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StorageFull("s3://bucket/batch_1"), "the object store has no room"),
        (AccessDenied("s3://bucket/batch_1"), "the object store refuses access"),
        (ObjectNotFound("s3://bucket/batch_1"), "an object of it is not in the object store"),
        (StorageUnavailable("s3://bucket"), "the object store cannot be reached, or fails"),
        (StoreUnavailable("postgresql://db"), "the database cannot be reached, or refuses"),
        (DispatchFailed("http://prefect"), "Prefect cannot be reached, or refuses"),
        (BatchyardError("secret"), "its last step failed (BatchyardError) and is repeated"),
        (KeyError("secret"), "its last step failed (KeyError) and is repeated"),
    ],
)
def test_a_wait_has_words_that_name_no_object_and_no_host(error: Exception, words: str) -> None:
    assert why_it_waits(error) == words
