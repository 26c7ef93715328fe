"""The images, built as their Containerfiles say and run by podman."""

from __future__ import annotations

import json
import time
import urllib.parse
from typing import TYPE_CHECKING

import prefect
import pytest

from batchyard import __version__
from tests.containers.conftest import IMAGES
from tests.containers.tools import BASE, Podman, pip_configuration

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

_COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "rustc")
# Without systemd, podman waits ten seconds for it at the start and the end of a container that has
# a check: only the tests of the check have it.
_RUN = ("podman", "run", "--network=none", "--no-healthcheck")
_STAND_IN = f"""\
FROM {BASE}
RUN mkdir /usr/lib/python3/dist-packages/vllm && \\
    cd /usr/lib/python3/dist-packages/vllm && touch __init__.py && \\
    echo "__version__ = version = '0.32.1'" >_version.py
"""


def run(podman: Podman, image: str, *words: str) -> str:
    return podman.output(*_RUN, "--rm", image, *words)


def sh(podman: Podman, image: str, script: str) -> str:
    return run(podman, image, "sh", "-c", script)


def logs(podman: Podman, name: str) -> str:
    said = podman.run("podman", "logs", name)
    return said.stdout + said.stderr


def test_it_is_the_product(podman: Podman, product: str) -> None:
    assert run(podman, product, "batchyard", "--version") == f"batchyard {__version__}"


def test_prefect_is_in_it(podman: Podman, product: str) -> None:
    """Its server too, which imports more than the command line."""
    program = "import prefect, prefect.server.api.server; print(prefect.__version__)"
    assert run(podman, product, "python", "-c", program) == prefect.__version__


def test_it_runs_as_a_user_without_rights(podman: Podman, product: str) -> None:
    assert sh(podman, product, "id -u; id -g; umask") == "10001\n10001\n0022"
    assert sh(podman, product, "stat -c '%a %U' /var/lib/batchyard") == "700 batchyard"
    assert sh(podman, product, "test -w /opt/batchyard || echo no") == "no"


def test_nothing_of_the_build_is_left(podman: Podman, product: str) -> None:
    """No compiler, no pip in the product's environment, no cache, no wheel and no source."""
    script = f"for each in {' '.join(_COMPILERS)}; do command -v $each; done; echo none"
    assert sh(podman, product, script) == "none"
    leftovers = "ls -d /src /opt/build /root/.cache /opt/batchyard/bin/pip /dist 2>/dev/null"
    assert sh(podman, product, f"{leftovers}; echo none") == "none"


def test_it_has_nothing_of_the_builders_pip(podman: Podman, product: str) -> None:
    """No index of the machine that built it, in a file, a variable or the image's history."""
    hosts = {
        urllib.parse.urlsplit(word).hostname
        for word in pip_configuration().split()
        if "://" in word
    } - {None}
    told = podman.output("podman", "image", "inspect", product)
    told += podman.output("podman", "history", "--no-trunc", product)
    told += sh(podman, product, "env; cat /etc/pip.conf /run/secrets/* 2>/dev/null; echo")
    assert not [host for host in hosts if host in told]


def test_it_says_what_it_is(podman: Podman, product: str) -> None:
    (image,) = json.loads(podman.output("podman", "image", "inspect", product))
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "Batchyard"
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_its_first_process_collects_those_that_lost_their_parent(
    podman: Podman, product: str
) -> None:
    script = "(sleep 0.2 & ) ; sleep 1; cat /proc/[0-9]*/stat | grep -c ' Z ' || true"
    assert sh(podman, product, script) == "0"


def test_serve_is_healthy_until_sigterm_ends_it_within_seconds(
    podman: Podman, product: str
) -> None:
    """With its default command, and with the tables that an embedded database gets by itself."""
    state_words = "{{.State.Running}} {{.State.ExitCode}}"
    name = podman.output("podman", "run", "--detach", "--network=none", product)
    try:
        deadline = time.monotonic() + 60
        while podman.run("podman", "healthcheck", "run", name, check=False).returncode:
            assert time.monotonic() < deadline, logs(podman, name)
            time.sleep(0.5)
        podman.output("podman", "kill", "--signal", "TERM", name)
        deadline = time.monotonic() + 10
        while (state := podman.output("podman", "inspect", "--format", state_words, name)) not in {
            "false 0",
            "false 143",
        }:
            assert state == "true 0", logs(podman, name)
            assert time.monotonic() < deadline, logs(podman, name)
            time.sleep(0.2)
    finally:
        podman.run("podman", "rm", "--force", "--time", "0", name, check=False)


def test_what_does_not_serve_is_not_healthy(podman: Podman, product: str) -> None:
    name = podman.output("podman", "run", "--detach", "--network=none", product, "sleep", "60")
    try:
        assert podman.run("podman", "healthcheck", "run", name, check=False).returncode == 1
    finally:
        podman.run("podman", "rm", "--force", "--time", "0", name, check=False)


def test_a_cuda_runner_has_the_product_beside_the_vllm_of_its_base(
    podman: Podman, tmp_path: Path
) -> None:
    """On a Debian whose Python has a stand-in for vLLM: the official image is in a registry."""
    (tmp_path / "Containerfile").write_text(_STAND_IN)
    podman.build(tmp_path / "Containerfile", "stand-in-vllm", context=tmp_path)
    options = ("--target=runner-cuda", "--build-arg=BASE=localhost/stand-in-vllm")
    podman.build(IMAGES / "Containerfile", "stand-in-runner-cuda", *options)
    try:
        words = (*_RUN, "--rm", "stand-in-runner-cuda")
        said = podman.run(*words, "batchyard", "doctor", "gpu", check=False).stdout
        assert "ok       engine    vLLM 0.32.1; slots of" in said, said
        assert podman.output(*words, "batchyard", "--version") == f"batchyard {__version__}"
    finally:
        podman.run("podman", "rmi", "--force", "stand-in-runner-cuda", "stand-in-vllm")


@pytest.mark.usefixtures("product")
def test_the_cpu_engine_computes_without_a_compiler(podman: Podman, engine_cpu: str) -> None:
    """A batch by `batchyard run`, in a container that reaches no network."""
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4},
    }
    # vLLM wants 160 MB of shared memory even for a tiny model, and the default is 64 MB.
    words_of_run = (*_RUN, "--rm", "--shm-size=1g", engine_cpu)
    words = "batchyard run -i in.jsonl -o out.jsonl --model /opt/models/tiny-chat"
    options = "--served-model-name tiny --enforce-eager --max-model-len 512"
    script = f"echo '{json.dumps(line)}' >in.jsonl && {words} {options} >&2 && cat out.jsonl"
    (answer,) = [
        json.loads(each)
        for each in podman.output(*words_of_run, "sh", "-c", script).splitlines()
        if each.startswith('{"id"')
    ]
    assert answer["custom_id"] == "one"
    assert answer["response"]["status_code"] == 200
