"""The rules and the dashboard: every metric in them is exported, and every alert is explained."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from batchyard.api.operators.metrics import metrics_page
from batchyard.lifecycle import BatchStatus
from batchyard.metrics.metric_families import FAMILIES
from batchyard.store.figures import DURATIONS, Backlog, EndedBatches, Figures, OpenBatches
from tests.deploy.tools import CHART, ROOT, one, rendered

if TYPE_CHECKING:
    from collections.abc import Iterator

MONITORING = ROOT / "infra" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/batchyard.json").read_text())
(GROUP,) = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
PAGE = (ROOT / "docs/how-to/monitor.md").read_text()

OF_WORKERS = {each.name for each in FAMILIES}
SUMS = dict.fromkeys(("completed", "failed", "input_tokens", "cached_tokens", "output_tokens"), 3)
FIGURES = Figures(
    ended=[
        EndedBatches(BatchStatus.COMPLETED, "/v1/x", "m", 2, 70.0, (1,) * len(DURATIONS), SUMS),
        EndedBatches(BatchStatus.FAILED, "/v1/x", None, 1, 1.0, (1,) * len(DURATIONS), SUMS),
    ],
    open=[OpenBatches(BatchStatus.IN_PROGRESS, "/v1/x", "m", 1, 0, 0, 9.0, 5.0, SUMS)],
    backlog=[Backlog("m", 10, 700.0, 1, 1), Backlog("a tenant's word", 5, 50.0, 2, 0)],
    runners={("chunks", "m", "live"): 1, ("batches", None, "live"): 1},
    deliveries={("webhook", "failed"): 1, ("webhook", "pending"): 2},
    deliveries_due=1,
    due_seconds=4.0,
    held_leases=frozenset({"reconciler"}),
    known_models=frozenset({"m"}),
    closed_models=frozenset({"m"}),
)


def samples() -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(metrics_page(FIGURES).decode()):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def value(name: str, **labels: str) -> float:
    (found,) = (number for each, its, number in samples() if (each, its) == (name, labels))
    return found


def expressions() -> Iterator[str]:
    for rule in GROUP["rules"]:
        yield rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def of_workers(expression: str) -> bool:
    return bool(OF_WORKERS & set(re.findall(r"\bbatchyard_\w+", expression)))


def test_every_metric_that_is_asked_for_is_exported() -> None:
    """A name that is misspelt would be an alert that never fires."""
    exported = {name for name, _, _ in samples()} | OF_WORKERS
    asked = {name for each in expressions() for name in re.findall(r"\bbatchyard_\w+", each)}
    asked -= {"batchyard_model"}  # a label of vLLM's metrics
    assert len(asked) > 10
    assert asked <= exported


def test_every_label_that_is_asked_for_is_exported() -> None:
    exported = {label for _, labels, _ in samples() for label in labels} | {"instance", "le"}
    exported |= {"engine", "batchyard_model", *(each.label for each in FAMILIES)}
    for expression in expressions():
        for group in re.findall(r"\b(?:by|on) \(([^()]*)\)", expression):
            assert set(group.replace(" ", "").split(",")) <= exported, expression


def test_every_expression_takes_one_of_the_apis_processes() -> None:
    """A sum over processes would count every batch as often as there are processes."""
    for expression in expressions():
        if not of_workers(expression):
            assert re.search(r"\b(max|min|absent)\b", expression), expression


@pytest.mark.parametrize("rule", GROUP["rules"], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["action"]
    assert f"| `{rule['alert']}` |" in PAGE


def test_what_is_to_be_done_about_failed_batches_shows_them() -> None:
    """`batchyard list` alone has only batches that have not ended."""
    (rule,) = (each for each in GROUP["rules"] if "BatchFailure" in each["alert"])
    (row,) = (line for line in PAGE.splitlines() if f"`{rule['alert']}`" in line)
    for words in (rule["annotations"]["action"], row):
        assert "`batchyard list --all`" in words


def test_panels_are_explained() -> None:
    assert all(panel["description"] for panel in DASHBOARD["panels"])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_lines_and_tokens_are_those_of_ended_and_of_running_batches() -> None:
    line = {"model": "m", "endpoint": "/v1/x", "outcome": "completed"}
    assert value("batchyard_lines_total", **line) == 6
    assert value("batchyard_tokens_total", model="m", kind="prompt") == 6


def test_a_model_that_no_runner_has_served_is_other() -> None:
    assert value("batchyard_backlog_tokens", model="m") == 700
    assert value("batchyard_backlog_tokens", model="other") == 50
    assert "a tenant's word" not in metrics_page(FIGURES).decode()


def test_durations_are_a_histogram() -> None:
    assert value("batchyard_batch_seconds_bucket", status="completed", le="10.0") == 1
    assert value("batchyard_batch_seconds_bucket", status="completed", le="+Inf") == 2
    assert value("batchyard_batch_seconds_count", status="completed") == 2
    assert value("batchyard_batch_seconds_sum", status="completed") == 70


def test_an_end_that_no_batch_has_come_to_is_counted_from_zero() -> None:
    """Prometheus sees no increase in the first value of a counter."""
    assert value("batchyard_batch_seconds_count", status="expired") == 0
    assert value("batchyard_batch_seconds_bucket", status="expired", le="+Inf") == 0


def test_without_a_database_that_is_all_that_is_known() -> None:
    page = metrics_page(None).decode()
    assert "batchyard_database_up 0.0" in page
    assert "batchyard_batches" not in page


def test_the_chart_has_the_same_rules() -> None:
    """It cannot read files outside its own folder, so it has a copy."""
    assert (CHART / "rules.yml").read_bytes() == (MONITORING / "rules.yml").read_bytes()
    made = rules_of_the_chart("metrics.podMonitor.enabled=false")
    assert made == yaml.safe_load((MONITORING / "rules.yml").read_text())


def rules_of_the_chart(*sets: str, name: str = "by") -> dict[str, Any]:
    documents = rendered(CHART / "ci/production-values.yaml", *sets)
    found: dict[str, Any] = one(documents, "PrometheusRule", name)["spec"]
    return found


def selectors(expression: str) -> list[tuple[str, str]]:
    """The metrics that it reads: the name, and what is in braces after it."""
    text = re.sub(r"\b(by|on) \([^()]*\)", "", expression)
    found = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?!\w*\s*\()(\{[^{}]*\})?", text)
    return [each for each in found if each[0] not in {"and", "or", "unless"}]


@pytest.mark.parametrize("rule", GROUP["rules"], ids=lambda rule: rule["alert"])
def test_every_selector_of_a_rule_has_braces(rule: dict[str, str]) -> None:
    """The chart adds its release to what has them; without them, it would miss the selector."""
    found = selectors(rule["expr"])
    assert found
    assert all(braces for _, braces in found), found


@pytest.mark.parametrize("number", range(len(GROUP["rules"])))
def test_a_rule_of_the_chart_reads_the_metrics_of_its_release_only(number: int) -> None:
    """Prometheus Operator calls the targets of a PodMonitor by its namespace and name."""
    documents = rendered(CHART / "ci/production-values.yaml", 'fullnameOverride="b"')
    assert one(documents, "PodMonitor", "b")
    (group,) = one(documents, "PrometheusRule", "b")["spec"]["groups"]
    rule, plain = group["rules"][number], GROUP["rules"][number]
    found = selectors(rule["expr"])
    assert [name for name, _ in found] == [name for name, _ in selectors(plain["expr"])]
    for _, braces in found:
        assert re.match(r'\{job="ai/b"[,}]', braces), rule["expr"]
    assert rule["labels"] == {**plain["labels"], "job": "ai/b"}


def test_a_selector_is_found_with_and_without_braces() -> None:
    text = 'max by (m) (sum(rate(a_b{x="or"}[5m])) > 0.2) unless on (m) vllm:c and d:e{}'
    assert selectors(text) == [("a_b", '{x="or"}'), ("vllm:c", ""), ("d:e", "{}")]
