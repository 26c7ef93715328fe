"""The S3 server's image: what it stores survives its container, and its upkeep cleans up."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.containers.tools import Podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

BUCKET = "batches"
LOGIN = "batchyard:batchyard"


@pytest.fixture
def volume(podman: Podman) -> Iterator[str]:
    name = podman.output("podman", "volume", "create")
    yield name
    podman.run("podman", "volume", "rm", "--force", name)


class Server:
    """A container of the image, on a volume that outlives it."""

    def __init__(self, podman: Podman, image: str, volume: str) -> None:
        self._podman = podman
        self._image = image
        self._volume = volume
        self.secret = secrets.token_hex(16)
        self.port = free_port()
        self.name = f"s3-{self.port}"

    def start(self, **variables: str) -> Any:
        """A client of the server, which answers."""
        variables = {"S3_SECRET_KEY": self.secret, **variables}
        self._podman.output(
            *("podman", "run", "--detach", "--no-healthcheck", "--name", self.name),
            *(f"--env={name}={value}" for name, value in variables.items()),
            *(f"--volume={self._volume}:/var/lib/s3", f"--publish=127.0.0.1:{self.port}:9000"),
            self._image,
        )
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=LOGIN,
            aws_secret_access_key=self.secret,
        )
        deadline = time.monotonic() + 60
        while not _has_bucket(client):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)
        return client

    def stop(self) -> float:
        """Stop and remove it; how many seconds that took."""
        began = time.monotonic()
        self._podman.output("podman", "stop", "--time", "30", self.name)
        took = time.monotonic() - began
        self._podman.output("podman", "rm", self.name)
        return took

    def run(self, *words: str) -> str:
        return self._podman.output("podman", "exec", self.name, *words)

    def log(self) -> str:
        said = self._podman.run("podman", "logs", self.name, check=False)
        return said.stdout + said.stderr


def _has_bucket(client: Any) -> bool:
    try:
        client.head_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError):
        return False
    return True


@pytest.fixture
def server(podman: Podman, s3_image: str, volume: str) -> Iterator[Server]:
    made = Server(podman, s3_image, volume)
    yield made
    podman.run("podman", "rm", "--force", "--time", "0", made.name, check=False)


def test_objects_survive_the_container_and_a_change_of_the_secret(server: Server) -> None:
    client = server.start()
    client.put_object(Bucket=BUCKET, Key="batchyard/one", Body=b"x" * 100_000)
    assert server.stop() < 15
    server.secret = secrets.token_hex(16)
    again = server.start()
    assert again.get_object(Bucket=BUCKET, Key="batchyard/one")["Body"].read() == b"x" * 100_000


def test_a_wrong_secret_is_refused(server: Server) -> None:
    server.start()
    stranger = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{server.port}",
        region_name="us-east-1",
        aws_access_key_id=LOGIN,
        aws_secret_access_key="testing",
    )
    with pytest.raises(ClientError, match="403"):
        stranger.head_bucket(Bucket=BUCKET)


def test_it_needs_a_secret(podman: Podman, s3_image: str) -> None:
    done = podman.run("podman", "run", "--rm", "--no-healthcheck", s3_image, check=False)
    assert done.returncode == 1
    assert "S3_SECRET_KEY is not set" in done.stderr


def test_the_markers_of_deleted_objects_do_not_stay(server: Server) -> None:
    """Each flush of a chunk is an object that is deleted later: without upkeep a disk fills up."""
    client = server.start(S3_UPKEEP_SECONDS="2", S3_RECLAIM_SECONDS="1")
    for number in range(20):
        client.put_object(Bucket=BUCKET, Key=f"segments/{number}", Body=b"x")
    for number in range(20):
        client.delete_object(Bucket=BUCKET, Key=f"segments/{number}")
    client.put_object(Bucket=BUCKET, Key="kept", Body=b"x")

    def markers() -> str:
        return server.run("sh", "-c", "find /var/lib/s3 -name '*.ts' | wc -l")

    deadline = time.monotonic() + 90
    while markers() != "0":
        assert time.monotonic() < deadline, f"{markers()} markers\n{server.log()}"
        time.sleep(1)
    assert client.get_object(Bucket=BUCKET, Key="kept")["Body"].read() == b"x"


def test_it_ends_when_one_of_its_servers_does(podman: Podman, server: Server) -> None:
    """The container is then started again as a whole."""
    server.start()
    server.run(
        "sh",
        "-c",
        "kill -9 $(grep -l swift-object-server /proc/[0-9]*/cmdline | tr -dc '0-9\\n' | head -1)",
    )
    code = podman.run("podman", "wait", server.name, timeout=60).stdout.strip()
    assert code == "1"
    assert "swift-object-server has ended" in server.log()
