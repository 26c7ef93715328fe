"""Where a batch's bytes lie in the object store. Every key is made here.

::

    files/<file id>                                   inputs
    files/<file id>.<epoch>                           outputs and error files
    files/<file id>.rows                              the rows that the input was made of
    batches/<batch id>/plan.<epoch>                   records in the order of execution
    batches/<batch id>/segments/<chunk>-<epoch>-<n>-<writer>   finished lines
    batches/<batch id>/stages/<stage>/<epoch>-<n>-<writer>   lines of a chain behind its first stage
    uploads/<upload id>/<part id>                     parts, until their upload has ended
    database                                          the mark of the database that names all these
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

FILES: Final = "files/"
BATCHES: Final = "batches/"
UPLOADS: Final = "uploads/"
MARK: Final = "database"


def file_key(file_id: str) -> str:
    """Where a file's bytes are."""
    return f"{FILES}{file_id}"


def result_key(file_id: str, epoch: int) -> str:
    """Where a result file is.

    ``epoch`` is that of the batch's lease: of two owners that make a file, one publishes it.
    """
    return f"{file_key(file_id)}.{epoch}"


def rows_key(input_file_id: str) -> str:
    """Where the rows are that an input was made of."""
    return f"{file_key(input_file_id)}.rows"


def plan_key(batch_id: str, epoch: int) -> str:
    """Where the plan of a batch is. Who reads it takes the key that the batch's row has.

    ``epoch`` is that of the batch's lease: of two owners that plan a batch, one begins it, and the
    other one's plan, which may have another order, must not lie in its place.
    """
    return f"{BATCHES}{batch_id}/plan.{epoch}"


def segments_prefix(batch_id: str) -> str:
    """What the keys of all segments of a batch begin with."""
    return f"{BATCHES}{batch_id}/segments/"


def chunk_prefix(batch_id: str, chunk_index: int) -> str:
    """What the keys of a chunk's segments begin with."""
    return f"{segments_prefix(batch_id)}{chunk_index:06d}-"


def segment_key(
    batch_id: str, chunk_index: int, epoch: int, sequence: int, writer: str = "0"
) -> str:
    """Keys sort by chunk, then epoch, then age.

    ``writer`` is random: after the database was restored from a backup an epoch comes again, and
    what was finished in its first time must not be overwritten.
    """
    return f"{chunk_prefix(batch_id, chunk_index)}{epoch:06d}-{sequence:06d}-{writer}"


def stage_prefix(batch_id: str, stage: int) -> str:
    """What the keys of the segments begin with that have the lines of one stage, from 1.

    Those of the first one are the batch's own. Those of the last one also have the errors of all
    stages, so they are its results.
    """
    return segments_prefix(batch_id) if stage == 1 else f"{BATCHES}{batch_id}/stages/{stage}/"


def results_prefix(batch: BatchRecord) -> str:
    """What the keys of the segments with a batch's results begin with: of a chain, those of its
    last stage."""
    return stage_prefix(batch.id, batch.stages + 1)


def stage_segment_key(batch_id: str, stage: int, epoch: int, sequence: int, writer: str) -> str:
    """The key of a stage's segment, like :func:`segment_key`; ``epoch`` is that of the batch's
    lease."""
    return f"{stage_prefix(batch_id, stage)}{epoch:06d}-{sequence:06d}-{writer}"


def part_key(upload_id: str, part_id: str) -> str:
    """Where a part of an upload is."""
    return f"{UPLOADS}{upload_id}/{part_id}"


def file_id_of(key: str) -> str:
    """The file that a key below :data:`FILES` belongs to."""
    return key.removeprefix(FILES).partition(".")[0]


def batch_id_of(key: str) -> str:
    """The batch that a key below :data:`BATCHES` belongs to."""
    return key.removeprefix(BATCHES).partition("/")[0]
