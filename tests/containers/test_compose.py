"""The compose file, brought up by podman-compose: batches on real vLLM, through S3, with faults."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import openai
import pytest

from tests.containers.batches import every_line_is_there_once, is_under_way, submitted
from tests.containers.installation import hooks, installation, wait
from tests.containers.tools import Podman, make_postgres
from tests.containers.versions import VERSIONS, build_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.containers.installation import Hooks, Installation

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def installed(
    podman: Podman,
    product: str,
    engine_cpu: str,
    s3_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    make_postgres(podman)
    with installation(podman, tmp_path_factory.mktemp("installation")) as made:
        yield made


@pytest.fixture(scope="module")
def client(installed: Installation) -> openai.OpenAI:
    key = installed.command("batchyard", "keys", "create", "tests")
    return openai.OpenAI(base_url=installed.url, api_key=key, max_retries=20)


@pytest.fixture
def receiver() -> Iterator[Hooks]:
    with hooks() as found:
        yield found


def test_the_one_shot_services_have_done_their_work(installed: Installation) -> None:
    for service in ("migrate", "deploy"):
        wait(
            lambda service=service: installed.exit_code(service) == 0,
            f"the end of {service}",
            installed.story,
        )


def test_the_services_that_stay_are_healthy(installed: Installation) -> None:
    for service in ("api", "prefect", "control", "runner-cpu", "s3"):
        wait(
            lambda service=service: installed.is_healthy(service),
            f"{service} is healthy",
            installed.story,
        )


def test_doctor_finds_nothing_wrong(installed: Installation) -> None:
    for service, role in {"api": "api", "control": "control", "runner-cpu": "gpu"}.items():
        said = installed.podman.output(
            "podman", "exec", f"batchyard_{service}_1", "batchyard", "doctor", role
        )
        assert "FAILED" not in said
        assert "ok       storage   s3://batches/batchyard" in said


def test_both_databases_can_be_dumped_as_the_page_says(installed: Installation) -> None:
    for database in ("batchyard", "prefect"):
        words = ("pg_dump", "-U", "batchyard", "--schema-only", database)
        said = installed.podman.output("podman", "exec", "batchyard_postgres_1", *words)
        assert "CREATE TABLE" in said


def test_no_service_has_a_secret_of_its_image_or_of_the_repository(
    installed: Installation,
) -> None:
    """The five secrets are those of this .env."""
    env = (installed.folder / ".env").read_text()
    secrets = dict(line.split("=", 1) for line in env.splitlines() if "=" in line)
    told = installed.podman.output("podman", "exec", "batchyard_api_1", "env")
    assert f"BATCHYARD_SECRET_KEY={secrets['SECRET_KEY']}" in told
    assert len(secrets["SECRET_KEY"]) == 44
    assert len(secrets["POSTGRES_PASSWORD"]) == 40


def test_a_batch_ends_with_a_signed_webhook(
    installed: Installation, client: openai.OpenAI, receiver: Hooks
) -> None:
    """By OpenAI's SDK, through S3; the SDK accepts the event's signature."""
    endpoint = client.webhooks.create(
        name="tests",
        url=f"http://{installed.gateway}:{receiver.port}/hook",
        event_types=["batch.completed"],
    )
    batch = submitted(client)
    every_line_is_there_once(client, batch, installed.story)
    headers, body = wait(
        lambda: receiver.events and receiver.events[0], "the webhook", installed.story
    )
    event = client.webhooks.unwrap(body, headers, secret=endpoint.signing_secret)
    assert event.type == "batch.completed"
    assert event.data.id == batch.id
    client.webhooks.delete(endpoint.id)


def kill_the_runner(installed: Installation) -> None:
    """As the kernel does when memory is short; `restart` starts it again."""
    before = installed.process_id("runner-cpu")
    installed.crash("runner-cpu")
    wait(
        lambda: installed.process_id("runner-cpu") not in {0, before},
        "another runner",
        installed.story,
    )


def restart(service: str) -> Callable[[Installation], None]:
    def fault(installed: Installation) -> None:
        installed.podman.run("podman", "restart", "--time", "5", f"batchyard_{service}_1")

    return fault


def recreate_everything_but_the_data(installed: Installation) -> None:
    """`down` without `--volumes`, and `up`: an upgrade, or a restart of the machine."""
    installed.compose("down", "--timeout", "20", timeout=600)
    installed.up()


FAULTS: dict[str, Callable[[Installation], None]] = {
    "the runner is killed": kill_the_runner,
    "PostgreSQL is restarted": restart("postgres"),
    "Prefect is restarted": restart("prefect"),
    "the S3 server is restarted": restart("s3"),
    "the control worker is restarted": restart("control"),
    "the API is restarted": restart("api"),
    "everything is made anew": recreate_everything_but_the_data,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_every_line_is_found_once_after(
    fault: Callable[[Installation], None], installed: Installation, client: openai.OpenAI
) -> None:
    batch = submitted(client)
    is_under_way(client, batch, installed.story)
    began = time.monotonic()
    fault(installed)
    every_line_is_there_once(client, batch, installed.story)
    print(f"{time.monotonic() - began:.0f} s until the end")  # noqa: T201 - for whoever measures


@pytest.fixture(scope="module")
def versions(
    installed: Installation, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The variables of .env that select each version, and those of the one that was installed."""
    folder = tmp_path_factory.mktemp("versions")
    made = {
        name: build_version(installed.podman, name, make(folder / name))
        for name, make in VERSIONS.items()
    }
    return made | {"as it was": build_version(installed.podman)}


@pytest.mark.parametrize("version", ["adds", "as it was", "renames"])
def test_every_line_is_found_once_after_a_change_to_the_version_that(
    version: str,
    versions: dict[str, dict[str, str]],
    installed: Installation,
    client: openai.OpenAI,
) -> None:
    """Tables that only add, the way back, and tables that older processes cannot use."""
    batch = submitted(client)
    is_under_way(client, batch, installed.story)
    began = time.monotonic()
    installed.set_variables(**versions[version])
    installed.up()
    every_line_is_there_once(client, batch, installed.story)
    print(f"{time.monotonic() - began:.0f} s until the end")  # noqa: T201 - for whoever measures
    product, engine = versions[version].values()
    images = {each: installed.image(each) for each in ("migrate", "deploy", "api", "prefect")}
    images |= {each: installed.image(each) for each in ("control", "runner-cpu")}
    assert images == dict.fromkeys(images, f"localhost/{product}") | {
        "runner-cpu": f"localhost/{engine}"
    }
