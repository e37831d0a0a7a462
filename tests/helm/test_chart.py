"""Goal: the chart makes manifests that Kubernetes accepts and a configuration that the daemon accepts, or says why not.

Method: several sets of values are rendered by Helm's own library; each manifest is validated strictly against the schemas
of an old and a new Kubernetes, the rendered kvtierd.toml is loaded by the daemon's own configuration code, and memory is
compared with the tiers' sizes. Wrong values must be refused with the name of the culprit.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from kvtierd.config import Config, load_config, parse_size

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvtierd"
KUBERNETES = ("1.29", "1.33")
PATH_IN_CONTAINER = "/nvme/"

DEFAULTS: dict[str, Any] = {}
SMALL = {"cpu": {"capacity": "512MiB"}, "memoryOverhead": "1GiB", "nvme": {"capacity": "1GiB", "reserve": "0MiB"}}
NO_NVME = {"nvme": {"capacity": "0GiB", "hostPaths": []}}
LARGE = {
    "image": {"repository": "registry.example/kvtierd", "digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "fullnameOverride": "kv",
    "cpu": {"capacity": "1TiB"},
    "nvme": {"capacity": "28TiB", "hostPaths": ["/mnt/a/kv", "/mnt/b/kv"]},
    "memoryOverhead": "48GiB",
    "cpuRequest": "1500m",
    "cpuLimit": "16",
    "socketHostPath": "/var/run/kv",
    "runAsUser": 4242,
    "drainTimeoutSeconds": 120,
    "config": {
        "cpu": {"ttl": "5min", "free_target": 0.25},
        "server": {"max_sessions": 64, "socket_mode": 0o660},
        "log": {"json_lines": True},
        "tenants": {"research": {"cpu_quota": "10GiB"}, "ops.team": {"nvme_ttl": "7d"}},
    },
    "metrics": {"port": 9999, "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}}},
    "serviceAccount": {"annotations": {"example.com/owner": "ops"}},
    "podAnnotations": {"example.com/note": "1"},
    "podLabels": {"team": "inference"},
    "nodeSelector": {"gpu": "true"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "kind", "operator": "In", "values": ["h200"]}]}]}}},
    "priorityClassName": "system-node-critical",
    "maxUnavailable": "10%",
}  # fmt: skip
VALUES = {"defaults": DEFAULTS, "small": SMALL, "no-nvme": NO_NVME, "large": LARGE}


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


def render(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Manifests by kind; the chart makes at most one of each."""
    chart.validate_schema(values)
    texts = chart.render(values, name="release", namespace="inference")
    manifests = [m for path, text in texts.items() if path.endswith(".yaml") for m in yaml.safe_load_all(text) if m]
    by_kind = {m["kind"]: m for m in manifests}
    assert len(by_kind) == len(manifests)
    return by_kind


def rendered_config(manifests: dict[str, dict[str, Any]], folder: Path) -> Config:
    path = folder / "kvtierd.toml"
    path.write_text(manifests["ConfigMap"]["data"]["kvtierd.toml"])
    return load_config(path, env={})


def memory_bytes(quantity: str) -> int:
    assert quantity.endswith("i"), quantity
    return parse_size(quantity + "B")


@pytest.mark.parametrize("name", VALUES)
def test_manifests_are_valid(chart: helm_python.Chart, name: str) -> None:
    manifests = render(chart, VALUES[name])
    expected = {"ConfigMap", "DaemonSet", "Service", "ServiceAccount"}
    assert set(manifests) - {"ServiceMonitor"} == expected
    for manifest in manifests.values():
        assert manifest["metadata"]["namespace"] == "inference"
        if manifest["kind"] in expected:
            for version in KUBERNETES:
                kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_configuration_and_memory_follow_from_the_tiers(chart: helm_python.Chart, name: str, tmp_path: Path) -> None:
    manifests = render(chart, VALUES[name])
    config = rendered_config(manifests, tmp_path)
    merged = chart.merge_values(VALUES[name])
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert config.cpu.capacity == parse_size(merged["cpu"]["capacity"])
    assert config.nvme.capacity == parse_size(merged["nvme"]["capacity"])
    resources = container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert memory_bytes(resources["limits"]["memory"]) == config.cpu.capacity + parse_size(merged["memoryOverhead"])
    assert pod["terminationGracePeriodSeconds"] > config.server.drain_timeout
    # every folder and the socket of the configuration lie on a volume of the node
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    if config.nvme.capacity:
        paths = [volumes[mounts[str(folder)]]["hostPath"]["path"] for folder in config.nvme.folders]
        assert paths == merged["nvme"]["hostPaths"]
    else:
        assert not [m for m in mounts if m.startswith(PATH_IN_CONTAINER)]
    socket_folder = str(config.server.socket.parent)
    assert volumes[mounts[socket_folder]]["hostPath"]["path"] == socket_folder == merged["socketHostPath"]
    assert {"name": "KVTIERD_ADDRESS", "value": f"unix:{config.server.socket}"} in container["env"]


@pytest.mark.parametrize("name", VALUES)
def test_container_is_confined_and_probed(chart: helm_python.Chart, name: str, tmp_path: Path) -> None:
    manifests = render(chart, VALUES[name])
    pod = manifests["DaemonSet"]["spec"]["template"]["spec"]
    [container], [folders] = pod["containers"], pod["initContainers"]
    context = container["securityContext"]
    assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert folders["command"][1] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    [port] = container["ports"]
    address, _, number = rendered_config(manifests, tmp_path).server.metrics.rpartition(":")
    assert (address, int(number)) == ("0.0.0.0", port["containerPort"])


def test_large_set_reaches_the_manifests(chart: helm_python.Chart, tmp_path: Path) -> None:
    manifests = render(chart, LARGE)
    config = rendered_config(manifests, tmp_path)
    assert (config.cpu.ttl, config.cpu.free_target, config.log.json_lines) == (300.0, 0.25, True)
    assert (config.server.max_sessions, config.server.socket_mode) == (64, 0o660)
    assert config.tenants["research"].cpu_quota == 10 << 30
    assert config.tenants["ops.team"].nvme_ttl == 7 * 86400
    daemonset = manifests["DaemonSet"]
    pod = daemonset["spec"]["template"]
    assert daemonset["metadata"]["name"] == "kv"
    assert pod["spec"]["containers"][0]["image"] == LARGE["image"]["repository"] + "@" + LARGE["image"]["digest"]
    for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "imagePullSecrets"):
        assert pod["spec"][key] == LARGE[key]
    assert pod["metadata"]["labels"]["team"] == "inference"
    monitor = manifests["ServiceMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["interval"] == "15s"
    # monitor -> service -> pods: the labels meet
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= manifests["Service"]["metadata"]["labels"].items()
    assert manifests["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_a_changed_configuration_restarts_the_pods(chart: helm_python.Chart) -> None:
    def checksum(values: dict[str, Any]) -> str:
        pod = render(chart, values)["DaemonSet"]["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({"podLabels": {"a": "b"}})
    assert checksum({}) != checksum({"config": {"cpu": {"ttl": "1min"}}})


REFUSED = [
    ({"cpuu": {}}, "cpuu"),
    ({"cpu": {"capacity": "64 gigs"}}, "capacity"),
    ({"cpu": {"capacity": "0GiB"}}, "capacity"),
    ({"cpu": {"capacity": 1024}}, "capacity"),
    ({"nvme": {"hostPaths": []}}, "hostPaths"),
    ({"nvme": {"hostPaths": ["relative"]}}, "hostPaths"),
    ({"nvme": {"hostPaths": ["/a", "/a"]}}, "hostPaths"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"image": {"digest": "sha256:abc"}}, "digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"metrics": {"port": 80}}, "port"),
    ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
    ({"config": {"gpu": {}}}, "gpu"),
    ({"socketHostPath": "/run/kvtierd/"}, "socketHostPath"),
    ({"maxUnavailable": 0}, "maxUnavailable"),
]


@pytest.mark.parametrize("values, culprit", REFUSED, ids=[f"{i}-{culprit}" for i, (_, culprit) in enumerate(REFUSED)])
def test_schema_refuses(chart: helm_python.Chart, values: dict[str, Any], culprit: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=culprit):
        chart.validate_schema(values)


@pytest.mark.parametrize("section, key", [("cpu", "capacity"), ("nvme", "folders"), ("server", "socket"), ("server", "metrics")])
def test_keys_that_the_chart_works_out_are_refused(chart: helm_python.Chart, section: str, key: str) -> None:
    values = {"config": {section: {key: "1GiB"}}}
    if key == "folders":
        values = {"config": {section: {key: ["/other"]}}}  # type: ignore[dict-item]
    with pytest.raises(helm_python.HelmRenderError, match=f"config.{section}.{key} is worked out by the chart"):
        chart.render(values, name="release", namespace="inference")


@pytest.mark.parametrize("name", VALUES)
def test_lint(name: str) -> None:
    result = helm_python.lint(CHART, VALUES[name], strict=True)
    assert not result["errors"]
    worse_than_advice = [m for m in result["messages"] if m["severity"] > 1]
    assert not worse_than_advice


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "k8s").glob("*.yaml")), ids=lambda p: p.stem)
def test_plain_manifests(path: Path, tmp_path: Path) -> None:
    """The examples without Helm: valid, with a configuration that loads and memory that holds the pool."""
    manifests = [m for m in yaml.safe_load_all(path.read_text()) if m]
    for manifest in manifests:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
    by_kind = {m["kind"]: m for m in manifests}
    config = rendered_config(by_kind, tmp_path)
    pod = by_kind["Pod"]["spec"] if "Pod" in by_kind else by_kind["DaemonSet"]["spec"]["template"]["spec"]
    [daemon] = [c for c in pod["containers"] + pod["initContainers"] if c["name"] == "kvtierd"]
    assert memory_bytes(daemon["resources"]["limits"]["memory"]) >= config.cpu.capacity + (2 << 30)
    assert daemon["resources"]["requests"]["memory"] == daemon["resources"]["limits"]["memory"]
    assert pod["terminationGracePeriodSeconds"] > config.server.drain_timeout
    mounts = {m["mountPath"] for m in daemon["volumeMounts"]}
    assert {str(config.server.socket.parent), *map(str, config.nvme.folders)} <= mounts


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
