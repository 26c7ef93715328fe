"""A real nginx with a committed example as its configuration, on ports of loopback."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trustme

from tests.patience import PATIENCE
from tests.services.debian import unpacked
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_EXAMPLES = Path(__file__).parents[2] / "infra" / "nginx"

_START_SECONDS = 20.0
# The header tells a test which server has answered.
_AROUND = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log info;
events {{ worker_connections 512; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    add_header x-upstream $upstream_addr always;
    include {folder}/example.conf;
}}
"""


@dataclass(frozen=True)
class Nginx:
    """A running proxy. ``context`` trusts its certificate, which ``ca_file`` has issued."""

    url: str
    context: ssl.SSLContext
    ca_file: Path


@contextlib.contextmanager
def running_nginx(
    folder: Path, servers: Sequence[str], example: str = "batchyard.conf"
) -> Iterator[Nginx]:
    """An example in front of ``servers``, each a host and a port."""
    program = unpacked("nginx") / "usr/sbin/nginx"
    port, plain = free_port(), free_port()
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    ports = {"443 ssl": f"{port} ssl", "80": str(plain)}
    (folder / "example.conf").write_text(_example(folder, example, ports, servers))
    (folder / "nginx.conf").write_text(_AROUND.format(folder=folder))
    process = subprocess.Popen(
        [program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"],
        stdin=subprocess.DEVNULL,
    )
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        _wait_until_it_listens(port, folder, process)
        yield Nginx(f"https://localhost:{port}/v1", context, folder / "ca.pem")
    finally:
        process.terminate()
        process.wait(10)


def _example(folder: Path, name: str, ports: Mapping[str, str], servers: Sequence[str]) -> str:
    """The example with this machine's addresses and certificate in their places."""
    text = (_EXAMPLES / name).read_text()
    upstream = "".join(f"    server {each}\\1;\n" for each in servers)
    server = (r"    server 127\.0\.0\.1:8000(.*);\n", upstream)
    if "upstream " not in text:
        server = (r"proxy_pass http://127\.0\.0\.1:\d+;", f"proxy_pass http://{servers[0]};")
    for pattern, value in (
        server,
        (r"    listen \[::\]:\d+( ssl)?;\n", ""),
        *((rf"listen {each};", f"listen 127.0.0.1:{port};") for each, port in ports.items()),
        (r"server_name \w+\.example\.org;", "server_name localhost;"),
        (r"/etc/nginx/tls/\w+\.crt", str(folder / "cert.pem")),
        (r"/etc/nginx/tls/\w+\.key", str(folder / "key.pem")),
    ):
        text, count = re.subn(pattern, value, text)
        assert count, pattern
    return text


def _wait_until_it_listens(port: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE * _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    log = folder / "error.log"
    raise RuntimeError(f"nginx did not start:\n{log.read_text() if log.exists() else ''}")
