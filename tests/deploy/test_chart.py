"""The Helm chart: every rendering is valid; its commands and settings exist."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from prefect.settings.legacy import _get_settings_fields
from prefect.settings.models.root import Settings as PrefectSettings

import batchyard
from batchyard.api.operators import health
from batchyard.cli import make_app
from batchyard.settings import Settings, read_settings
from batchyard.settings_sources import OTHER_VARIABLES, PREFIX, _names
from commands.prefect.deploy_file import read_deploy_file
from tests.deploy.tools import (
    CHART,
    VALUES,
    one,
    pod_specs,
    pod_templates,
    refused,
    rendered,
    run_helm,
)

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from tests.deploy.tools import Document

VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest that the chart allows, and the newest whose schemas there are."""
CUSTOM = (
    *("HTTPRoute", "LeaderWorkerSet", "PodMonitor", "PrometheusRule", "ScaledObject"),
    "TriggerAuthentication",
)
"""Kinds that Kubernetes itself does not know; kubernetes-validate has no schema for them."""
SMALLEST, TRIAL = CHART / "ci/smallest-values.yaml", CHART / "ci/trial-values.yaml"
PRODUCTION, JOBS = CHART / "ci/production-values.yaml", CHART / "ci/jobs-values.yaml"
OF_OTHERS = {"HOME", "USER", "HF_HOME", "VLLM_CACHE_ROOT", "NCCL_P2P_LEVEL"} | {
    "AWS_ENDPOINT_URL",
    "AWS_DEFAULT_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
}

every_values_file = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)


def known_variables() -> set[str]:
    ours = {f"{PREFIX}{name}" for name in _names(Settings)} | set(OTHER_VARIABLES)
    return ours | set(_get_settings_fields(PrefectSettings)) | OF_OTHERS


@cache
def commands() -> dict[str, click.Command]:
    group = typer.main.get_group(make_app())
    return dict(group.commands)


def environment_of(container: Document) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def files_of(values: Path, folder: Path, *sets: str) -> tuple[Path, Path]:
    """The file of settings and that of models, as pods have them."""
    (config,) = (each for each in rendered(values, *sets) if each["kind"] == "ConfigMap")
    paths = folder / "batchyard.toml", folder / "models.toml"
    for path in paths:
        path.write_text(config["data"][path.name])
    return paths


def source_of(rule: Document) -> str:
    """The one namespace that a rule of a network policy lets in."""
    (source,) = rule["from"]
    return str(source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])


@every_values_file
@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_valid(values: Path, version: str) -> None:
    for document in rendered(values):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)
        for template in pod_templates(document).values():
            metadata = {"name": document["metadata"]["name"]}
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata}
            kubernetes_validate.validate(pod | {"template": template}, version, strict=True)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    done = run_helm("lint", "--strict", CHART, "--values", SMALLEST)
    assert done.returncode == 0, done.stdout + done.stderr


@every_values_file
def test_every_object_has_a_name_of_its_own_and_the_release_in_its_labels(values: Path) -> None:
    documents = rendered(values)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(set(names)) == len(names)
    for each in documents:
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "by"


@every_values_file
def test_a_selector_finds_the_pods_that_are_meant(values: Path) -> None:
    documents = rendered(values)
    for each in documents:
        if each["kind"] == "Deployment":
            labels = each["spec"]["template"]["metadata"]["labels"].items()
            assert each["spec"]["selector"]["matchLabels"].items() <= labels
    name = next(each["metadata"]["name"] for each in documents if each["kind"] == "Service")
    service, api = one(documents, "Service", name), one(documents, "Deployment", name)
    labels = api["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@every_values_file
def test_pods_can_only_write_to_their_volumes(values: Path) -> None:
    """And their user is not root; a Service's variables would stop their start."""
    for _, pod in pod_specs(rendered(values)):
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        volumes = {each["name"] for each in pod["volumes"]}
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) == volumes
        environment = environment_of(container)
        assert "tmp" in mounts.values()
        for name in ("HOME", "BATCHYARD_HOME", "PREFECT_HOME"):
            assert environment[name].startswith("/var/lib/batchyard")
        assert mounts["/var/lib/batchyard"] == "home"


@every_values_file
def test_every_variable_is_a_setting_of_somebody(values: Path) -> None:
    """A misspelt BATCHYARD_ name would stop the process, and one of Prefect would do nothing."""
    known = known_variables()
    for where, pod in pod_specs(rendered(values)):
        unknown = environment_of(pod["containers"][0]).keys() - known
        assert not unknown, where
    for document in rendered(values):
        if document["kind"] == "Secret":
            assert document["stringData"].keys() <= known


@every_values_file
def test_no_pod_starts_without_the_database_and_the_key_of_all(values: Path) -> None:
    """It would use its own, in its home: batches that it accepts would be lost with the pod."""
    for where, pod in pod_specs(rendered(values)):
        sources = {each["name"]: each.get("valueFrom") for each in pod["containers"][0]["env"]}
        wanted = {"BATCHYARD_DATABASE_URL", "BATCHYARD_SECRET_KEY"}
        if "migrate" in where:
            wanted.remove("BATCHYARD_SECRET_KEY")
        for name in wanted:
            reference = sources[name]["secretKeyRef"]
            assert (reference["key"], reference.get("optional")) == (name, None)


@every_values_file
def test_every_command_exists(values: Path) -> None:
    for _, pod in pod_specs(rendered(values)):
        program, command, *words = pod["containers"][0]["args"]
        assert program == "batchyard"
        options = {option for each in commands()[command].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= options


@every_values_file
def test_the_file_of_settings_can_be_read(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("USER_S3_SECRET", "USER_AZURE_SAS", "USER_GOOGLE_KEY", "USER_HF_TOKEN")
    for name in ("ELSEWHERE_API_KEY", *secrets):
        monkeypatch.setenv(name, "given")
    path, models_path = files_of(values, tmp_path)
    monkeypatch.setenv("BATCHYARD_CONFIG", str(path))
    assert str(read_settings().storage).startswith("s3://")
    given = yaml.safe_load(values.read_text())
    wanted = read_deploy_file(models_path)
    models = [model.block.model for model in wanted.models]
    assert models == [each["model"] for each in given.get("models", [])]
    runners = [each["pool"] for each in given.get("runners", [{"pool": "gpu"}])]
    assert list(wanted.engines_at_once) == runners
    assert not set(wanted.pool_of_model.values()) - set(wanted.gpu_pools)


def test_values_arrive_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, non-ASCII, numbers with and without a fraction, lists, tables, line ends."""
    odd = {"x": 'a "b" \\ c\n<é>'}
    models = [
        {"model": 'm\'s "q"', "options": "--a 'b'", "environment": odd, "adapters": {"a.b": "/c"}},
        {"model": "far", "base_url": "http://far/v1", "adapters": ["x", "y"]},
    ]
    settings = {"flush_seconds": 2.5, "lease_seconds": 90, "cache_groups": {"g": ["a", "b"]}}
    sets = f"models={json.dumps(models)}", f"settings={json.dumps(settings)}"
    path, models_path = files_of(SMALLEST, tmp_path, *sets)
    data = tomllib.loads(path.read_text())
    assert tomllib.loads(models_path.read_text())["models"] == models
    assert {name: data[name] for name in settings} == settings
    monkeypatch.setenv("BATCHYARD_CONFIG", str(path))
    assert read_settings().lease_seconds == 90


def test_a_pool_may_run_as_many_engines_as_it_can_have_pods(tmp_path: Path) -> None:
    """Or pods would wait for work while batches wait for engines."""
    settings, models = (path.read_text() for path in files_of(PRODUCTION, tmp_path))
    limits = tomllib.loads(models)["engines_at_once"]
    assert limits == {"gpu": 8, "big_gpu": 2, "two_nodes": 1, "remote": 2}
    assert tomllib.loads(settings)["pools"] == {
        "org/it's-large": "big_gpu",
        "org/huge": "two_nodes",
        "elsewhere": "remote",
    }


def test_a_new_model_restarts_no_pod_and_a_setting_restarts_all() -> None:
    """GPU pods would drain one after the other for what only `batchyard deploy` reads."""

    def templates(*sets: str) -> list[Document]:
        documents = rendered(SMALLEST, *sets)
        return [each["spec"]["template"] for each in documents if each["kind"] == "Deployment"]

    before = templates()
    assert templates('models=[{"model": "new"}]') == before
    after = templates('settings={"flush_seconds": 5}')
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_runner_has_the_gpus_of_its_limits_and_no_slots() -> None:
    documents = rendered(PRODUCTION)
    pod = one(documents, "Deployment", "by-runner-big-gpu")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][:5] == ["batchyard", "worker", "big_gpu", "--limit", "1"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "32Gi"}
    assert pod["runtimeClassName"] == "nvidia"
    remote = one(documents, "Deployment", "by-runner-remote")["spec"]["template"]["spec"]
    assert remote["containers"][0]["resources"]["limits"] == {"memory": "2Gi"}


def test_an_engine_over_several_nodes_is_a_group_of_pods_and_its_first_is_the_runner() -> None:
    """The others wait for it at the address that the operator gives them."""
    documents = rendered(PRODUCTION)
    group = one(documents, "LeaderWorkerSet", "by-runner-two-nodes")["spec"]
    assert (group["replicas"], group["leaderWorkerTemplate"]["size"]) == (1, 2)
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "None"
    leader, worker = (
        group["leaderWorkerTemplate"][f"{name}Template"] for name in ("leader", "worker")
    )
    (runner,), (node,) = (each["spec"]["containers"] for each in (leader, worker))
    assert runner["args"][:3] == ["batchyard", "worker", "two_nodes"]
    assert node["args"] == ["batchyard", "engine-node"]
    assert leader["metadata"] == worker["metadata"]
    assert runner["resources"] == node["resources"]
    assert node["resources"]["limits"] == {"nvidia.com/gpu": 8}
    # Prometheus would find nothing there.
    assert "ports" not in node


def test_only_the_nodes_of_a_pool_can_connect_to_each_other() -> None:
    documents = rendered(PRODUCTION)
    policy = one(documents, "NetworkPolicy", "by-runner-two-nodes")["spec"]
    (rule,) = policy["ingress"]
    assert rule == {"from": [{"podSelector": policy["podSelector"]}]}
    group = one(documents, "LeaderWorkerSet", "by-runner-two-nodes")
    wanted = policy["podSelector"]["matchLabels"].items()
    for name, template in pod_templates(group).items():
        assert wanted <= template["metadata"]["labels"].items(), name
    gpu = one(documents, "Deployment", "by-runner-gpu")["spec"]["template"]
    assert not wanted <= gpu["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        ({"pool": "gpu"}, "models: m needs 2 nodes, so its pool gpu needs as many in runners"),
        ({"pool": "gpu", "nodes": 2, "keda": {"enabled": True}}, "which keda cannot scale"),
        ({"pool": "gpu", "nodes": 0}, "minimum: got 0, want 1"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(runner: Document, words: str) -> None:
    models = [{"model": "m", "nodes": 2, "options": "-dp 2"}]
    assert words in refused(SMALLEST, {"models": models, "runners": [runner]})


@every_values_file
def test_a_pod_is_killed_only_after_its_drain(values: Path) -> None:
    """The drain, and then the end of the engine, Prefect's record and the worker itself."""
    for where, pod in pod_specs(rendered(values)):
        drain = environment_of(pod["containers"][0]).get("BATCHYARD_DRAIN_SECONDS")
        if "runner" in where or "control" in where:
            assert pod["terminationGracePeriodSeconds"] >= int(drain) + 60


def test_migrate_comes_first_and_with_a_secret_that_is_there() -> None:
    """Before an installation no object of the release exists, and none is needed."""
    documents = rendered(TRIAL)
    job = one(documents, "Job", "batchyard-migrate")
    secret = one(documents, "Secret", "batchyard-migrate")
    for each in (job, secret):
        assert each["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert int(secret["metadata"]["annotations"]["helm.sh/hook-weight"]) < 0
    pod = job["spec"]["template"]["spec"]
    assert "serviceAccountName" not in pod
    assert "envFrom" not in pod["containers"][0]
    assert [each["name"] for each in pod["volumes"]] == ["home", "tmp"]
    deploy = one(documents, "Job", "batchyard-deploy")
    assert deploy["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"


def test_a_user_of_its_own_may_migrate() -> None:
    job = one(rendered(PRODUCTION), "Job", "by-migrate")
    environment = job["spec"]["template"]["spec"]["containers"][0]["env"]
    (url,) = (each for each in environment if each["name"] == "BATCHYARD_DATABASE_URL")
    assert url["valueFrom"]["secretKeyRef"]["name"] == "batchyard-owner"


def test_secrets_are_only_in_secrets() -> None:
    for document in rendered(TRIAL):
        if document["kind"] != "Secret":
            text = json.dumps(document)
            assert "testing" not in text
            assert "admin:secret" not in text
            assert "batchyard:secret" not in text


def test_only_the_api_can_be_connected_to() -> None:
    documents = rendered(PRODUCTION)
    everything = one(documents, "NetworkPolicy", "by")["spec"]
    assert "ingress" not in everything
    rules = one(documents, "NetworkPolicy", "by-api")["spec"]["ingress"]
    assert [rule["ports"] for rule in rules] == [[{"port": "http", "protocol": "TCP"}]] * 2
    assert [source_of(rule) for rule in rules] == ["ingress-nginx", "monitoring"]


def test_prometheus_can_read_the_apis_metrics_where_others_may_not_connect() -> None:
    """Otherwise the alert of a database that is down would fire for ever."""
    (api,) = one(rendered(PRODUCTION), "Deployment", "by-api")["spec"]["template"]["spec"][
        "containers"
    ]
    assert "http" in {each["name"] for each in api["ports"]}
    *_, rule = one(rendered(PRODUCTION), "NetworkPolicy", "by-api")["spec"]["ingress"]
    assert source_of(rule) == "monitoring"
    for sets in ("networkPolicy.metricsFrom=[]", "metrics.enabled=false"):
        (rule,) = one(rendered(PRODUCTION, sets), "NetworkPolicy", "by-api")["spec"]["ingress"]
        assert source_of(rule) == "ingress-nginx"
    everybody = rendered(PRODUCTION, "networkPolicy.apiFrom=[]")
    (rule,) = one(everybody, "NetworkPolicy", "by-api")["spec"]["ingress"]
    assert "from" not in rule


def test_only_prometheus_can_connect_to_the_metrics_of_workers() -> None:
    documents = rendered(PRODUCTION)
    policy = one(documents, "NetworkPolicy", "by-metrics")["spec"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "metrics", "protocol": "TCP"}]
    assert len(rule["from"]) == 1
    for sets in ("networkPolicy.metricsFrom=[]", "metrics.enabled=false"):
        names = {each["metadata"]["name"] for each in rendered(PRODUCTION, sets)}
        # An empty `from` would let everybody in.
        assert "by-metrics" not in names


def test_only_the_api_can_connect_to_the_port_of_live_requests() -> None:
    """It is the one that the runner's engine listens on, at the pod's own address."""
    documents = rendered(PRODUCTION)
    for pool in ("gpu", "big-gpu", "remote"):
        runner = one(documents, "Deployment", f"by-runner-{pool}")["spec"]["template"]
        (container,) = runner["spec"]["containers"]
        assert {"name": "live", "containerPort": 8100} in container["ports"]
        assert environment_of(container)["BATCHYARD_LIVE_PORT"] == "8100"
        (host,) = (each for each in container["env"] if each["name"] == "BATCHYARD_LIVE_HOST")
        assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    (rule,) = one(documents, "NetworkPolicy", "by-live")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "live", "protocol": "TCP"}]
    (source,) = rule["from"]
    api = one(documents, "Deployment", "by-api")["spec"]["template"]["metadata"]["labels"]
    control = one(documents, "Deployment", "by-control")["spec"]["template"]["metadata"]["labels"]
    wanted = source["podSelector"]["matchLabels"].items()
    assert wanted <= api.items()
    assert not wanted <= control.items()


def test_without_live_requests_no_runner_opens_their_port() -> None:
    documents = rendered(SMALLEST)
    assert "by-live" not in {each["metadata"]["name"] for each in documents}
    for where, pod in pod_specs(documents):
        (container,) = pod["containers"]
        assert "BATCHYARD_LIVE_HOST" not in environment_of(container), where
        assert "live" not in {each["name"] for each in container.get("ports", [])}, where


@every_values_file
def test_each_worker_serves_its_metrics_on_the_port_that_is_scraped(values: Path) -> None:
    for where, pod in pod_specs(rendered(values)):
        (container,) = pod["containers"]
        if "worker" in container["args"]:
            host, port = container["args"][-3], container["args"][-1]
            assert (host, port) == ("0.0.0.0", "9464"), where  # noqa: S104 - a pod's own address
            assert {"name": "metrics", "containerPort": 9464} in container["ports"]
    for where, pod in pod_specs(rendered(values, "metrics.enabled=false")):
        (container,) = pod["containers"]
        assert "--metrics-port" not in container["args"], where
        assert "metrics" not in {each["name"] for each in container.get("ports", [])}


def test_a_pod_monitor_finds_the_pods() -> None:
    """Prometheus Operator finds the object by its labels."""
    documents = rendered(PRODUCTION)
    monitor = one(documents, "PodMonitor", "by")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    asked = [(each["port"], each["path"], each["interval"]) for each in endpoints]
    assert asked == [("metrics", "/metrics", "30s"), ("http", "/metrics", "30s")]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    runner = one(documents, "Deployment", "by-runner-gpu")["spec"]["template"]
    assert wanted <= runner["metadata"]["labels"].items()
    assert not [each for each in rendered(SMALLEST) if each["kind"] == "PodMonitor"]


def test_the_label_endpoint_is_that_of_our_metrics() -> None:
    """Prometheus Operator has set one with the port's name before these are applied."""
    monitor = one(rendered(PRODUCTION), "PodMonitor", "by")
    for each in monitor["spec"]["podMetricsEndpoints"]:
        assert each["relabelings"] == [{"action": "labeldrop", "regex": "endpoint"}], each["port"]


def test_prometheus_sends_the_token_to_the_api_alone() -> None:
    sets = 'metrics.podMonitor.tokenSecret={"name": "batchyard-secrets"}'
    of_workers, of_api = one(rendered(PRODUCTION, sets), "PodMonitor", "by")["spec"][
        "podMetricsEndpoints"
    ]
    assert of_api["authorization"]["credentials"] == {
        "name": "batchyard-secrets",
        "key": "BATCHYARD_METRICS_TOKEN",
    }
    assert "authorization" not in of_workers


def test_without_runners_there_is_no_cache_and_no_pod_of_a_runner() -> None:
    documents = rendered(JOBS)
    kinds = {each["kind"] for each in documents}
    assert "PersistentVolumeClaim" not in kinds
    assert not [each for each in documents if "runner" in each["metadata"]["name"]]
    route = one(documents, "HTTPRoute", "by-api")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "by-api", "port": 80}]


def test_keda_scales_the_deployment_of_the_pool() -> None:
    documents = rendered(PRODUCTION)
    deployments = {e["metadata"]["name"] for e in documents if e["kind"] == "Deployment"}
    scaled = [each for each in documents if each["kind"] == "ScaledObject"]
    assert len(scaled) == 2
    for each in scaled:
        spec = each["spec"]
        assert spec["scaleTargetRef"]["name"] in deployments
        assert (
            "replicas" not in one(documents, "Deployment", spec["scaleTargetRef"]["name"])["spec"]
        )
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "postgresql"
        login = one(documents, "TriggerAuthentication", trigger["authenticationRef"]["name"])
        (reference,) = login["spec"]["secretTargetRef"]
        expected = {"parameter": "connection", "name": "batchyard-keda", "key": "url"}
        assert reference == expected
        # All of KEDA's metadata are texts.
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_the_api_is_started_again_only_if_it_hangs() -> None:
    """Without its database it is not ready, and a start from the beginning would not help."""
    api = one(rendered(SMALLEST), "Deployment", "by-api")["spec"]["template"]["spec"]
    probes = {
        probe: api["containers"][0][probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert probes == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert set(probes.values()) <= {route.path for route in health.router.routes}


def test_the_chart_has_the_version_of_the_product() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == batchyard.__version__
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"apii": {}}, "apii"),
        ({"api.replica": 2}, "replica"),
        ({"api.replicas": 0}, "api/replicas"),
        ({"prefect.apiUrl": "http://prefect:4200"}, "prefect/apiUrl"),
        ({"storage": "/srv/objects"}, "storage"),
        ({"existingSecret": ""}, "secrets.databaseUrl"),
        ({"secrets.secretKey": "short"}, "secrets/secretKey"),
        ({"secrets.databaseUrl": "sqlite:///x"}, "secrets/databaseUrl"),
        ({"models": [{"options": "--x"}]}, "models"),
        ({"models": [{"model": "m", "option": "--x"}]}, "models"),
        ({"models": [{"model": "m", "environment": {"A": 1}}]}, "models"),
        ({"settings.storge": "x"}, "storge"),
        ({"settings.machine": "gpu-1"}, "machine"),
        ({"settings.engine_slots": ["0"]}, "engine_slots"),
        ({"settings.smtp": {"password": "x"}}, "smtp"),
        ({"runners": [{"pool": "control"}]}, "pool"),
        ({"runners": [{"replicas": 1}]}, "pool"),
        ({"runners": [{"pool": "big.gpu"}, {"pool": "Big_gpu"}]}, "two entries"),
        ({"runners": [{"pool": "gpu", "shmSize": "big"}]}, "shmSize"),
        ({"runners": [{"pool": "gpu", "env": {"BATCHYARD_MACHINE": "x"}}]}, "MACHINE"),
        ({"runners": [{"pool": "gpu", "env": {"CUDA_VISIBLE_DEVICES": "0"}}]}, "CUDA"),
        ({"runnerDefaults.keda.maxReplica": 3}, "maxReplica"),
        ({"podSecurityContext.runAsNonRoot": False}, "podSecurityContext"),
        ({"api.ingress.enabled": True}, "hosts"),
        ({"metrics.port": 80}, "metrics/port"),
        ({"live.port": 80}, "live/port"),
        ({"models": [{"model": "m", "live": True}]}, "live.enabled must be true"),
        ({"runners": [{"pool": "gpu", "env": {"BATCHYARD_LIVE_HOST": "x"}}]}, "LIVE_HOST"),
        ({"metrics.podMonitor.interval": "often"}, "interval"),
    ],
    ids=str,
)
def test_values_that_would_not_work_are_refused(patch: object, says: str) -> None:
    assert says in refused(SMALLEST, patch)


def test_the_schema_knows_every_setting_that_a_chart_may_set() -> None:
    """Left out is what the chart makes itself, and what all pods of a release must not share."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = set(schema["properties"]["settings"]["propertyNames"]["enum"])
    of_the_chart = {
        *("home", "database_url", "storage", "secret_key", "pools", "drain_seconds", "live_port"),
    }
    of_the_secret = {"metrics_token"}
    of_deployments = {"runners", "pool", "tenant"}
    of_a_machine = {
        *("engine_python", "engine_slots", "machine", "live_host", "shared_paths", "ca_file"),
    }
    others = of_the_chart | of_the_secret | of_deployments | of_a_machine
    assert Settings.model_fields.keys() - allowed == others
    assert allowed <= Settings.model_fields.keys()


def test_every_value_has_a_comment_and_is_in_the_schema() -> None:
    """As deep as the schema has names."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        is_first_level = line[:1].isalpha() and line.endswith(":")
        if is_first_level or (line[:1].isalpha() and ": " in line):
            assert lines[number - 1].startswith("#") or line.startswith(
                ("runnerDefaults", "serviceAccount", "prefect")
            ), line
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load("\n".join(lines))
    assert values.keys() == schema["properties"].keys() - {"global"}
