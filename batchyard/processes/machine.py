"""Which machine this process is on: a name for people, and an identity that no other machine has.

Leases on what only one machine has (its engine slots, a pause after failures) carry the identity,
messages the name. Who shares an identity shares devices: see ADR 28.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_BOOT_DIGITS: Final = 12
"""48 random bits: two machines of one name will not have the same."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``name`` is for messages; ``identity`` is for keys, and holds the name."""

    name: str
    identity: str

    def __str__(self) -> str:
        return self.name


def this_machine(name: str | None = None, *, boot_id: Path = _BOOT_ID) -> Machine:
    """The machine of this process. ``name``: the operator's for it; None: its hostname.

    The identity adds the kernel's boot id. It is another one on every machine, however many have
    been cloned from one image, and the same in all containers of a host. After a restart of the
    machine it is a new one: no engine from before can have its devices any more.
    """
    name = name or socket.gethostname()
    try:
        digits = boot_id.read_text().strip().replace("-", "")[:_BOOT_DIGITS]
    except OSError:
        # Some sandboxes have no such file; the name has to do.
        digits = ""
    return Machine(name, f"{name}@{digits}" if digits else name)
