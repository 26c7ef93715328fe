"""Where a batch's files come from and go to, as locations. In its row they are sealed text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.locations.location import parse_location
from batchyard.store import BatchLocations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.batch.batch_options import DeliveryKind
    from batchyard.locations.access import Location
    from batchyard.services.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLocations:
    """Where the user keeps the input and wants the results. None: in the object store only.

    ``template``: the input is a dataset, and this makes a request of each row.
    """

    input: Location | None = None
    output: Location | None = None
    error: Location | None = None
    template: str | None = None

    @property
    def dataset(self) -> Location | None:
        """The input, if it is one."""
        return None if self.template is None else self.input

    def to_text(self, receivers: Mapping[DeliveryKind, str] | None = None) -> BatchLocations:
        """The locations as the database keeps them, with those who are notified of the batch's
        end."""
        return BatchLocations(
            _text(self.input), _text(self.output), _text(self.error), receivers or {}, self.template
        )


async def places_of(services: Services, batch_id: str) -> UserLocations:
    """Those of the batch's row, which were parsed when the batch was created."""
    wanted = await services.store.batch_places.locations(batch_id)
    return UserLocations(
        input=_place(wanted.input),
        output=_place(wanted.output),
        error=_place(wanted.error),
        template=wanted.template,
    )


def _text(place: Location | None) -> str | None:
    return None if place is None else place.text


def _place(text: str | None) -> Location | None:
    return None if text is None else parse_location(text)
