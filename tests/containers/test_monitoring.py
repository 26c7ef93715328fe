"""A real Prometheus reads the API's figures, and runs every rule and every panel.

Helm renders the chart's PodMonitor. Prometheus Operator is not here: its part of the configuration
is written as its ``generatePodMonitorConfig`` does.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from batchyard.lifecycle import BatchStatus
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from tests.api.conftest import make_keys, served
from tests.contract.store.samples import MODEL, batch_in, begun_batch
from tests.deploy.test_monitoring import MONITORING, expressions, rules_of_the_chart
from tests.deploy.tools import CHART, one, rendered
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from batchyard.settings import Settings
    from tests.containers.tools import Podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

RULES_TEST = yaml.safe_load((MONITORING / "rules_test.yml").read_text())
GONE = "the API is gone"
JOB = "ai/by"
"""What Prometheus Operator calls the targets of the PodMonitor ``by`` in the namespace ``ai``."""


@pytest.fixture(scope="module")
def prometheus(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one that has read the figures of some batches, several times."""
    folder = tmp_path_factory.mktemp("prometheus")
    settings = read_settings(home=folder / "home")
    keys = asyncio.run(make_keys(settings))
    asyncio.run(fill(settings))
    with served(settings, keys) as api:
        configuration = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (job,) = (
            each for each in configuration["scrape_configs"] if each["job_name"] == "batchyard-api"
        )
        job["static_configs"] = [{"targets": [f"127.0.0.1:{api.port}"]}]
        configuration["scrape_configs"] = [job, by_the_operator(f"127.0.0.1:{api.port}")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        (folder / "rules.yml").write_bytes((MONITORING / "rules.yml").read_bytes())
        port = free_port()
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [
                    program(podman, "prometheus"),
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while count_of_scrapes(url) < 3:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def by_the_operator(target: str) -> dict[str, Any]:
    """How Prometheus Operator has the API scraped for the chart's PodMonitor."""
    monitor = one(rendered(CHART / "ci/production-values.yaml"), "PodMonitor", "by")
    _, api = monitor["spec"]["podMetricsEndpoints"]
    labels = {"namespace": "ai", "container": "api", "pod": "by-api-0", "job": JOB}
    labels["endpoint"] = api["port"]
    first = [{"target_label": name, "replacement": value} for name, value in labels.items()]
    return {
        "job_name": "podMonitor/ai/by/1",
        "honor_labels": api.get("honorLabels", False),
        "static_configs": [{"targets": [target]}],
        "relabel_configs": [*first, *api.get("relabelings", [])],
    }


async def fill(settings: Settings) -> None:
    """Batches of several statuses; the only model is one that was served."""
    async with open_services(settings) as services:
        await services.store.rates.record(MODEL, "gpu", load_seconds=1.0)
        await begun_batch(services.store, chunks=2)
        for status in (BatchStatus.COMPLETED, BatchStatus.FAILED):
            await batch_in(services.store, status)


def program(podman: Podman, name: str) -> str:
    found = shutil.which(name, path=podman.environment["PATH"])
    assert found
    return found


def query(url: str, expression: str) -> list[dict[str, Any]]:
    words = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=10) as answer:  # noqa: S310
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def count_of_scrapes(url: str) -> int:
    try:
        found = query(url, "min(count_over_time(batchyard_database_up[1m]))")
    except OSError:
        return 0
    return int(found[0]["value"][1]) if found else 0


@pytest.mark.parametrize("words", [("check", "config", "prometheus.yml"), ("test", "rules")])
def test_promtool_finds_nothing_wrong(podman: Podman, words: tuple[str, ...]) -> None:
    files = () if "config" in words else ("rules_test.yml",)
    done = subprocess.run(
        [program(podman, "promtool"), *words, *files],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_healthy_release_hides_no_alert_of_another(podman: Podman, tmp_path: Path) -> None:
    """Two releases of the chart, which one Prometheus scrapes."""
    others = rules_of_the_chart('fullnameOverride="other"', name="other")
    files = {"rules.yml": rules_of_the_chart(), "others.yml": others}
    tests = {each["name"]: each for each in RULES_TEST["tests"]}
    healthy = series_of("ai/other", tests["nothing is wrong"])
    made = [of_two_releases(tests[name], healthy) for name in ("everything is wrong", GONE)]
    files["test.yml"] = {**RULES_TEST, "rule_files": ["rules.yml", "others.yml"], "tests": made}
    for name, content in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [program(podman, "promtool"), "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def series_of(job: str, test: dict[str, Any]) -> list[dict[str, str]]:
    """The series of a test of the rules, with the label that the operator gives."""
    return [
        {**each, "series": each["series"].replace("{", f'{{job="{job}",', 1)}
        for each in test["input_series"]
    ]


def of_two_releases(test: dict[str, Any], healthy: list[dict[str, str]]) -> dict[str, Any]:
    """The same alerts, of our release, and none of the other one."""
    (checked,) = test["promql_expr_test"]
    labels = f',job="{JOB}"}}'
    expected = [
        {**each, "labels": each["labels"].replace("}", labels)} for each in checked["exp_samples"]
    ]
    expression = checked["expr"].replace("by (alertname)", "by (alertname, job)")
    return {
        **test,
        "input_series": series_of(JOB, test) + healthy,
        "promql_expr_test": [{**checked, "expr": expression, "exp_samples": expected}],
    }


def test_the_api_is_up_for_it(prometheus: str) -> None:
    (found,) = query(prometheus, 'up{job="batchyard-api"}')
    assert found["value"][1] == "1"


def test_it_has_the_backlog(prometheus: str) -> None:
    (found,) = query(prometheus, "max by (model) (batchyard_backlog_requests)")
    assert (found["metric"], found["value"][1]) == ({"model": MODEL}, "20")


def test_with_the_operators_labels_a_metric_keeps_its_own(prometheus: str) -> None:
    """Each endpoint's batches would be in a label that no panel asks for."""
    labels = f"{{job={JOB!r}, namespace='ai', pod='by-api-0'}}"
    found = query(prometheus, f"count by (endpoint, exported_endpoint) (batchyard_batches{labels})")
    assert [each["metric"] for each in found] == [{"endpoint": "/v1/chat/completions"}]


@pytest.mark.parametrize("expression", list(dict.fromkeys(expressions())))
def test_it_can_compute(prometheus: str, expression: str) -> None:
    """Every rule, and every line of the dashboard: HTTP 400 otherwise."""
    query(prometheus, expression)


def test_its_rules_are_at_work(prometheus: str) -> None:
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=10) as answer:  # noqa: S310
        (group,) = json.load(answer)["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    assert len(group["rules"]) >= 8
