"""Swift's configuration for one machine with one disk: the servers, their rings, the account.

The tests' S3 server has it too (``tests/services/swift.py``).
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

BACKENDS: Final = ("account", "container", "object")
KINDS: Final = (*BACKENDS, "proxy")

# The suffix is part of where objects lie: another one, and none of them is found.
_SWIFT_CONF = """\
[swift-hash]
swift_hash_path_suffix = batchyard

[storage-policy:0]
name = only
default = yes
"""

_SERVER = """\
[DEFAULT]
bind_ip = {address}
bind_port = {port}
workers = 0
user = {user}
swift_dir = {root}
log_address = {root}/no-syslog
log_level = WARNING
"""

_BACKEND = """\
devices = {devices}
mount_check = false
fallocate_reserve = 0
disable_fallocate = true

[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}

[{kind}-replicator]
reclaim_age = {reclaim_seconds}
recon_cache_path = {root}

[{kind}-updater]
recon_cache_path = {root}
"""

_PROXY = """\

[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck proxy-logging listing_formats bulk tempurl s3api \
tempauth slo dlo versioned_writes copy proxy-logging proxy-server

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true

[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{user_name} = {secret} .admin

[filter:s3api]
use = egg:swift#s3api
location = {region}
s3_acl = false

[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:tempurl]
use = egg:swift#tempurl
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
[filter:copy]
use = egg:swift#copy
"""

_RINGS_SECONDS: Final = 120.0
RECLAIM_SECONDS: Final = 86_400
"""Markers of deleted objects are kept for a day; with one disk there is no copy to tell."""


def write_configuration(
    root: Path,
    ports: Mapping[str, int],
    *,
    devices: Path,
    login: str,
    secret: str,
    region: str,
    address: str = "127.0.0.1",
    reclaim_seconds: int = RECLAIM_SECONDS,
) -> None:
    """Everything that the four servers read, below ``root``; what they store is in ``devices``.

    ``login`` is ``account:user``, which is the access key as well; ``address`` is the proxy's.
    """
    (devices / "disk").mkdir(parents=True, exist_ok=True)
    (root / "swift.conf").write_text(_SWIFT_CONF)
    account, _, user_name = login.partition(":")
    common = {"root": root, "devices": devices, "user": pwd.getpwuid(os.getuid()).pw_name}
    _write_rings_apart(root, ports)
    for kind in BACKENDS:
        text = (_SERVER + _BACKEND).format(
            **common,
            kind=kind,
            address="127.0.0.1",
            port=ports[kind],
            reclaim_seconds=reclaim_seconds,
        )
        (root / f"{kind}.conf").write_text(text)
    proxy = root / "proxy.conf"
    proxy.touch(mode=0o600)
    proxy.write_text(
        (_SERVER + _PROXY).format(
            **common,
            address=address,
            port=ports["proxy"],
            account=account,
            user_name=user_name,
            secret=secret,
            region=region,
        )
    )


def _write_rings_apart(root: Path, ports: Mapping[str, int]) -> None:
    """In a process of its own: Swift imports eventlet 0.41, which leaves the process another
    ``http.server``. A threaded server that is made afterwards answers nothing."""
    words = [str(root), *(f"{kind}={ports[kind]}" for kind in BACKENDS)]
    subprocess.run([sys.executable, __file__, *words], check=True, timeout=_RINGS_SECONDS)


def _write_ring(root: Path, kind: str, port: int) -> None:
    """One device, one replica, two partitions: the smallest ring that Swift accepts."""
    from swift.common.ring.builder import RingBuilder  # noqa: PLC0415 - tests may be without it

    builder = RingBuilder(part_power=1, replicas=1, min_part_hours=0)
    builder.add_dev(
        {"region": 1, "zone": 1, "weight": 1, "ip": "127.0.0.1", "port": port, "device": "disk"}
    )
    builder.rebalance()
    builder.get_ring().save(str(root / f"{kind}.ring.gz"))


if __name__ == "__main__":
    for each in sys.argv[2:]:
        ring, _, its_port = each.partition("=")
        _write_ring(Path(sys.argv[1]), ring, int(its_port))
