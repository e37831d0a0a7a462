"""Goal: another chart can put the daemon into its pods, and the example that does is complete.

Method: helm/vllm-kvtierd is rendered with the kvtierd chart as its dependency, as Helm itself resolves it; each object is validated
strictly, and what the engine and the daemon have to agree on (socket, user, arguments, memory) is compared.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest

from kvtierd.connectors.vllm.settings import Settings
from tests.helm.rendering import CHART, EXAMPLE, check_daemon, daemon_of, kinds, loaded, memory_bytes, mounts_of, only, render

pytestmark = pytest.mark.slow

GIB = 1 << 30
FULL = {
    "image": {"repository": "registry.example/vllm-kvtierd", "tag": "1"},
    "imagePullSecrets": [{"name": "registry"}],
    "model": "deepseek-ai/DeepSeek-V3",
    "args": ["--max-model-len=65536", "--kv-cache-dtype=fp8"],
    "tensorParallelSize": 8,
    "replicas": 3,
    "port": 9000,
    "cacheClaim": "models",
    "hubTokenSecret": "hub",
    "apiKeySecret": "key",
    "networkPolicy": {"enabled": True, "apiFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
    "nodeSelector": {"gpu": "h200"},
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm"}}}]}},
    "kvtierd": {
        "runAsUser": 4242,
        "runAsGroup": 4243,
        "drainTimeoutSeconds": 90,
        "socketHostPath": "/run/kv",
        "cpu": {"capacity": "512GiB"},
        "nvme": {"capacity": "14TiB", "hostPaths": ["/mnt/a", "/mnt/b"]},
        "sidecar": {"volume": "hostPath", "connector": {"kvtierd.tenant": "research", "kvtierd.max_loads": 64}},
        "tenants": {"research": {"nvme_quota": "2TiB"}},
        "gpu": {"enabled": True},
        "config": {"nvme": {"io": "kvikio"}},
        "metrics": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}},
    },
}  # fmt: skip
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "full": FULL,
    "ephemeral": {"kvtierd": {"sidecar": {"volume": "ephemeral", "storageClassName": "local"}}},
    "claim": {"kvtierd": {"sidecar": {"volume": "claim", "claimName": "kv"}}},
    "no-nvme": {"kvtierd": {"nvme": {"capacity": "0GiB"}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its dependency, which Helm takes from beside it."""
    base = tmp_path_factory.mktemp("helm")
    for source in (CHART, EXAMPLE):
        shutil.copytree(source, base / source.name)
    helm_python.dependency_update(base / EXAMPLE.name)
    return base / EXAMPLE.name


@pytest.fixture(scope="module")
def chart(folder: Path) -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(folder) as made:
        yield made


def pod_of(chart: helm_python.Chart, name: str) -> dict[str, Any]:
    return dict(only(render(chart, VALUES[name]), "Deployment")["spec"]["template"]["spec"])


def engine_of(pod: dict[str, Any]) -> dict[str, Any]:
    [engine] = pod["containers"]
    assert engine["name"] == "vllm"
    return dict(engine)


@pytest.mark.parametrize("name", VALUES)
def test_objects_are_valid_and_no_more_than_asked_for(chart: helm_python.Chart, name: str) -> None:
    more = ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"] if name == "full" else []
    assert kinds(render(chart, VALUES[name])) == sorted(["ConfigMap", "Deployment", "Service", *more])


@pytest.mark.parametrize("name", VALUES)
def test_the_daemon_starts_before_the_engine_and_holds_nothing_back(chart: helm_python.Chart, name: str, tmp_path: Path) -> None:
    pod = pod_of(chart, name)
    check_daemon(pod, loaded(render(chart, VALUES[name]), tmp_path))
    daemon = pod["initContainers"][-1]
    assert daemon["name"] == "kvtierd"
    assert daemon["restartPolicy"] == "Always", "else the engine would wait for its end"
    assert "startupProbe" not in daemon
    assert "readinessProbe" not in daemon
    assert [c["name"] for c in pod["initContainers"][:-1]] == (["kvtierd-folders"] if name == "full" else [])


@pytest.mark.parametrize("name", VALUES)
def test_engine_and_daemon_agree(chart: helm_python.Chart, name: str, tmp_path: Path) -> None:
    manifests = render(chart, VALUES[name])
    config = loaded(manifests, tmp_path)
    pod = pod_of(chart, name)
    engine, daemon = engine_of(pod), daemon_of(pod)
    folder = str(config.server.socket.parent)
    assert {"name": "KVTIERD_ADDRESS", "value": f"unix:{config.server.socket}"} in engine["env"]
    assert mounts_of(engine, pod)[folder] == mounts_of(daemon, pod)[folder]
    assert mounts_of(engine, pod)[folder]["emptyDir"]["medium"] == "Memory"
    for key in ("runAsUser", "runAsGroup"):
        assert engine["securityContext"][key] == daemon["securityContext"][key]
    assert pod["securityContext"]["fsGroup"] == daemon["securityContext"]["runAsGroup"]
    # the pool counts with the daemon: nothing of the engine's limit depends on it
    assert memory_bytes(engine["resources"]["limits"]["memory"]) == 32 * GIB
    # its own shared memory does count with the engine
    assert memory_bytes(mounts_of(engine, pod)["/dev/shm"]["emptyDir"]["sizeLimit"]) < 32 * GIB
    assert "nvidia.com/gpu" not in daemon["resources"]["limits"]


def test_arguments_of_the_engine(chart: helm_python.Chart) -> None:
    for name, settings in (("defaults", {}), ("full", FULL["kvtierd"]["sidecar"]["connector"])):  # type: ignore[index]
        engine = engine_of(pod_of(chart, name))
        arguments = engine["args"]
        transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        assert transfer.pop("kv_connector_extra_config", {}) == settings
        assert set(settings) <= {f"kvtierd.{field}" for field in Settings.__dataclass_fields__}
        assert transfer == {
            "kv_connector": "KvtierdConnector",
            "kv_connector_module_path": "kvtierd.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    full = engine_of(pod_of(chart, "full"))
    assert full["args"][:3] == ["deepseek-ai/DeepSeek-V3", "--port=9000", "--tensor-parallel-size=8"]
    assert full["args"][-2:] == FULL["args"]
    assert full["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert full["image"] == "registry.example/vllm-kvtierd:1"


def test_secrets_are_named_and_never_written_down(chart: helm_python.Chart) -> None:
    env = {e["name"]: e for e in engine_of(pod_of(chart, "full"))["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert env["VLLM_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "key", "key": "api-key"}}
    assert not [e for e in engine_of(pod_of(chart, "defaults"))["env"] if "valueFrom" in e]


@pytest.mark.parametrize(
    "name, strategy, kind, size",
    [
        ("defaults", "RollingUpdate", "emptyDir", lambda v: v["sizeLimit"]),
        ("ephemeral", "RollingUpdate", "ephemeral", lambda v: v["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]),
        ("claim", "Recreate", "persistentVolumeClaim", None),
        ("full", "Recreate", "hostPath", None),
        ("no-nvme", "RollingUpdate", None, None),
    ],
)
def test_volumes_of_nvme_and_the_strategy_that_goes_with_them(
    chart: helm_python.Chart, name: str, strategy: str, kind: str | None, size: Any, tmp_path: Path
) -> None:
    """Where the folder outlives a pod, the old daemon has to be gone before the new one comes."""
    manifests = render(chart, VALUES[name])
    config = loaded(manifests, tmp_path)
    deployment = only(manifests, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": strategy}
    pod = deployment["spec"]["template"]["spec"]
    mounts = mounts_of(daemon_of(pod), pod)
    volumes = [mounts[str(folder)] for folder in config.nvme.folders] if config.nvme.capacity else []
    assert [kind in volume for volume in volumes] == [True] * {"full": 2, "no-nvme": 0}.get(name, 1)
    if size is not None:
        assert memory_bytes(size(volumes[0][kind])) >= config.nvme.capacity + config.nvme.reserve + GIB
    if name == "ephemeral":
        assert volumes[0][kind]["volumeClaimTemplate"]["spec"]["storageClassName"] == "local"


def test_full_set_reaches_the_objects(chart: helm_python.Chart, tmp_path: Path) -> None:
    manifests = render(chart, FULL)
    config = loaded(manifests, tmp_path)
    assert config.tenants["research"].nvme_quota == 2 << 40
    assert config.nvme.io == "kvikio"
    template = only(manifests, "Deployment")["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"].items()
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["terminationGracePeriodSeconds"] == 120
    assert mounts_of(engine_of(pod), pod)["/cache"]["persistentVolumeClaim"] == {"claimName": "models"}
    for key in ("nodeSelector", "affinity", "imagePullSecrets"):
        assert pod[key] == FULL[key]
    for kind, path in (("PodMonitor", "selector"), ("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        assert only(manifests, kind)["spec"][path]["matchLabels"].items() <= labels, kind
    assert only(manifests, "Service")["spec"]["selector"].items() <= labels
    [endpoint] = only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {p["name"] for p in daemon_of(pod)["ports"]}


def test_the_policy_opens_the_api_to_none_but_those_named(chart: helm_python.Chart) -> None:
    rules = only(render(chart, FULL), "NetworkPolicy")["spec"]["ingress"]
    open_to = {p["port"]: rule.get("from", "any") for rule in rules for p in rule["ports"]}
    assert open_to == {9000: FULL["networkPolicy"]["apiFrom"], 9464: "any"}  # type: ignore[index]
    peers = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    both = {**FULL, "networkPolicy": {**FULL["networkPolicy"], "metricsFrom": peers}}  # type: ignore[dict-item]
    rules = only(render(chart, both), "NetworkPolicy")["spec"]["ingress"]
    assert [[p["port"] for p in rule["ports"]] for rule in rules] == [[9000], [9464, 9000]]
    assert rules[1]["from"] == peers


def test_a_changed_configuration_restarts_the_pods(chart: helm_python.Chart) -> None:
    def checksum(values: dict[str, Any]) -> str:
        annotations = only(render(chart, values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/kvtierd-config"])

    assert checksum({}) == checksum({"replicas": 2})
    assert checksum({}) != checksum({"kvtierd": {"cpu": {"capacity": "1GiB"}}})


@pytest.mark.parametrize(
    "values, culprit",
    [
        ({"modle": "x"}, "modle"),
        ({"args": ["--kv-transfer-config={}"]}, "args"),
        ({"memory": "32Gi"}, "memory"),
        ({"tensorParallelSize": 0}, "tensorParallelSize"),
        ({"kvtierd": {"mode": "daemonset"}}, "mode"),
        ({"kvtierd": {"cpu": {"capacity": "lots"}}}, "capacity"),
        ({"kvtierd": {"cppu": {}}}, "cppu"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "maxUnavailable"),
    ],
)
def test_schema_refuses(chart: helm_python.Chart, values: dict[str, Any], culprit: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=culprit):
        chart.validate_schema(values)


def test_the_templates_insist_on_their_mode(folder: Path, tmp_path: Path) -> None:
    """A chart of one's own, whose schema does not know of the mode."""
    copy = tmp_path / "own"
    shutil.copytree(folder, copy)
    (copy / "values.schema.json").unlink()
    with (
        helm_python.Chart.load(copy) as own,
        pytest.raises(helm_python.HelmRenderError, match="set it in the values of the kvtierd chart"),
    ):
        own.render({"kvtierd": {"mode": "daemonset"}}, name="release", namespace="inference")


@pytest.mark.parametrize("name", VALUES)
def test_lint(folder: Path, name: str) -> None:
    result = helm_python.lint(folder, VALUES[name], strict=True, with_subcharts=True)
    assert not result["errors"]
    assert not [m for m in result["messages"] if m["severity"] > 1]
