"""Goal: the chart makes manifests that Kubernetes accepts and a configuration that the daemon accepts, or says why not.

Method: several sets of values are rendered by Helm's own library; each object is validated strictly (``rendering.validate``), the
rendered kvtierd.toml is loaded by the daemon's own configuration code, and memory is compared with the tiers' sizes. Wrong
values must be refused with the name of the culprit.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from kvtierd.config import Config, parse_size
from tests.helm.rendering import (
    CHART,
    EXAMPLE,
    ROOT,
    check_daemon,
    daemon_of,
    kinds,
    loaded,
    memory_bytes,
    mounts_of,
    only,
    render,
)

pytestmark = pytest.mark.slow

DEFAULTS: dict[str, Any] = {}
SMALL = {"cpu": {"capacity": "512MiB"}, "memoryOverhead": "1GiB", "nvme": {"capacity": "1GiB", "reserve": "0MiB"}}
NO_NVME = {"nvme": {"capacity": "0GiB", "hostPaths": []}}
BARE = {"nvme": {"capacity": "0GiB"}, "networkPolicy": {"enabled": True}, "updateStrategy": "OnDelete"}
OPEN = {"listen": {"port": 9460, "insecure": True}, "gpu": {"enabled": True}}
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
        "policy": {"turn_bonus": "60s"},
        "server": {"max_sessions": 64, "socket_mode": 0o660},
        "log": {"json_lines": True},
    },
    "tenants": {
        "research": {"cpu_quota": "10GiB"},
        "ops.team": {"nvme_ttl": "7d"},
        "chat": {"class": "premium", "cpu_reserve": "25%"},
    },
    "listen": {"port": 9460},
    "tls": {"secretName": "kvtierd-tls", "clientCA": True},
    "tokens": {"secretName": "kvtierd-tokens"},
    "metrics": {
        "port": 9999,
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "apiFrom": [{"podSelector": {"matchLabels": {"app": "tool"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "podDisruptionBudget": {"enabled": True, "minAvailable": 3},
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
VALUES = {"defaults": DEFAULTS, "small": SMALL, "no-nvme": NO_NVME, "bare": BARE, "open": OPEN, "large": LARGE}
ALWAYS = ["ConfigMap", "DaemonSet", "Service", "ServiceAccount"]


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as made:
        yield made


@pytest.mark.parametrize(
    "name, more",
    [
        ("defaults", []),
        ("small", []),
        ("no-nvme", []),
        ("bare", ["NetworkPolicy"]),
        ("open", []),
        ("large", ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PrometheusRule", "ServiceMonitor"]),
    ],
)
def test_objects_are_valid_and_no_more_than_asked_for(chart: helm_python.Chart, name: str, more: list[str]) -> None:
    assert kinds(render(chart, VALUES[name])) == sorted(ALWAYS + more)


@pytest.mark.parametrize("name", VALUES)
def test_pod_follows_from_the_tiers(chart: helm_python.Chart, name: str, tmp_path: Path) -> None:
    manifests = render(chart, VALUES[name])
    config = loaded(manifests, tmp_path)
    merged = chart.merge_values(VALUES[name])
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    check_daemon(pod, config)
    container = daemon_of(pod)
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": container["livenessProbe"]["httpGet"]["port"]}
    assert config.cpu.capacity == parse_size(merged["cpu"]["capacity"])
    assert config.nvme.capacity == parse_size(merged["nvme"]["capacity"])
    # every folder and the socket of the configuration lie on a volume of the node
    mounts = mounts_of(container, pod)
    if config.nvme.capacity:
        assert [mounts[str(folder)]["hostPath"]["path"] for folder in config.nvme.folders] == merged["nvme"]["hostPaths"]
    else:
        assert not [m for m in mounts if m.startswith("/nvme")]
    socket_folder = str(config.server.socket.parent)
    assert mounts[socket_folder]["hostPath"]["path"] == socket_folder == merged["socketHostPath"]
    assert {"name": "KVTIERD_ADDRESS", "value": f"unix:{config.server.socket}"} in container["env"]


@pytest.mark.parametrize(
    "values, mib",
    [
        ({}, 8192 + 2048 + 36),  # 72 GiB / 2048
        ({"cpu": {"capacity": "64GiB"}, "nvme": {"capacity": "1TiB"}}, 65536 + 2048 + 544),
        ({"cpu": {"capacity": "1TiB"}, "nvme": {"capacity": "28TiB"}}, (1 << 20) + 2048 + 14848),
        ({"memoryOverhead": "3GiB"}, 8192 + 3072),
    ],
)
def test_memory_is_the_pool_and_the_overhead(chart: helm_python.Chart, values: dict[str, Any], mib: int) -> None:
    container = daemon_of(only(render(chart, values), "DaemonSet")["spec"]["template"]["spec"])
    assert memory_bytes(container["resources"]["limits"]["memory"]) == mib << 20


def test_large_set_reaches_the_manifests(chart: helm_python.Chart, tmp_path: Path) -> None:
    manifests = render(chart, LARGE)
    config = loaded(manifests, tmp_path)
    assert (config.cpu.ttl, config.cpu.free_target, config.log.json_lines) == (300.0, 0.25, True)
    assert (config.server.max_sessions, config.server.socket_mode, config.policy.turn_bonus) == (64, 0o660, 60)
    assert config.tenants["research"].cpu_quota == 10 << 30
    assert config.tenants["ops.team"].nvme_ttl == 7 * 86400
    assert config.tenants["chat"].tenant_class == "premium"
    daemonset = manifests["DaemonSet", "kv"]
    pod = daemonset["spec"]["template"]
    assert daemonset["spec"]["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}
    assert daemon_of(pod["spec"])["image"] == LARGE["image"]["repository"] + "@" + LARGE["image"]["digest"]
    for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "imagePullSecrets"):
        assert pod["spec"][key] == LARGE[key]
    assert pod["metadata"]["labels"]["team"] == "inference"


def test_selectors_find_the_pods(chart: helm_python.Chart) -> None:
    manifests = render(chart, LARGE)
    labels = only(manifests, "DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    service = only(manifests, "Service")
    assert only(manifests, "DaemonSet")["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    assert only(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    monitor = only(manifests, "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["interval"] == "15s"
    assert endpoint["port"] in {p["name"] for p in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    # the alert for an absent daemon goes by the job, whatever the release is called
    assert {"targetLabel": "job", "replacement": "kvtierd"} in endpoint["relabelings"]


def test_service_and_policy_open_the_ports_that_the_daemon_has(chart: helm_python.Chart) -> None:
    for values, expected in ((LARGE, {9999, 9460}), (BARE, {9464}), ({**OPEN, "networkPolicy": {"enabled": True}}, {9464, 9460})):
        manifests = render(chart, values)
        pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
        ports = {p["name"]: p["containerPort"] for p in daemon_of(pod)["ports"]}
        assert set(ports.values()) == expected
        assert {ports[p["targetPort"]] for p in only(manifests, "Service")["spec"]["ports"]} == expected
        policy = only(manifests, "NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert {p["port"] for rule in policy["ingress"] for p in rule["ports"]} == expected
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in only(render(chart, LARGE), "NetworkPolicy")["spec"]["ingress"]}
    assert rules == {9999: LARGE["networkPolicy"]["metricsFrom"], 9460: LARGE["networkPolicy"]["apiFrom"]}
    assert only(render(chart, LARGE), "NetworkPolicy")["spec"]["egress"] == LARGE["networkPolicy"]["egress"]
    assert only(render(chart, BARE), "NetworkPolicy")["spec"]["egress"] == []
    assert "from" not in only(render(chart, BARE), "NetworkPolicy")["spec"]["ingress"][0]
    further = [{"ports": [{"port": 5557, "protocol": "TCP"}]}]
    assert (
        only(render(chart, {"networkPolicy": {"enabled": True, "ingress": further}}), "NetworkPolicy")["spec"]["ingress"][1:]
        == further
    )


def test_tls_comes_from_a_secret(chart: helm_python.Chart, tmp_path: Path) -> None:
    manifests = render(chart, LARGE)
    server = loaded(manifests, tmp_path).server
    assert server.listen == "0.0.0.0:9460"
    assert not server.insecure
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    mounts = mounts_of(daemon_of(pod), pod)
    for path, name in ((server.tls_cert, "tls.crt"), (server.tls_key, "tls.key"), (server.tls_client_ca, "ca.crt")):
        assert path is not None
        assert path.name == name
        assert mounts[str(path.parent)]["secret"] == {"secretName": "kvtierd-tls", "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == daemon_of(pod)["securityContext"]["runAsGroup"]  # who may read it
    assert loaded(render(chart, {"listen": {"port": 9460}, "tls": {"secretName": "a"}}), tmp_path).server.tls_client_ca is None
    assert loaded(render(chart, OPEN), tmp_path).server.insecure
    assert loaded(render(chart, {}), tmp_path).server.listen is None


def test_tokens_and_the_key_come_from_secrets(chart: helm_python.Chart, tmp_path: Path) -> None:
    nvme = {"nvme": LARGE["nvme"] | {"encryptionSecretName": "kvtierd-key"}}
    manifests = render(chart, LARGE | nvme | {"config": {"server": {"unix_tokens": "admin", "allow_users": [2000]}}})
    config = loaded(manifests, tmp_path)
    server, key = config.server, config.nvme.encryption_key_file
    assert (server.unix_tokens, server.allow_users) == ("admin", [2000])
    pod = only(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert server.token_file is not None and key is not None
    assert (server.token_file.name, key.name) == ("tokens.toml", "nvme.key")
    mounts = mounts_of(daemon_of(pod), pod)
    assert mounts[str(server.token_file.parent)]["secret"] == {"secretName": "kvtierd-tokens", "defaultMode": 0o440}
    assert mounts[str(key.parent)]["secret"] == {"secretName": "kvtierd-key", "defaultMode": 0o440}
    plain = loaded(render(chart, {}), tmp_path)
    assert plain.server.token_file is None and plain.nvme.encryption_key_file is None


def test_gpus_are_seen_but_not_taken(chart: helm_python.Chart) -> None:
    pod = only(render(chart, OPEN), "DaemonSet")["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in daemon_of(pod)["env"]
    assert set(daemon_of(pod)["resources"]["limits"]) == {"memory"}
    plain = only(render(chart, {}), "DaemonSet")["spec"]["template"]["spec"]
    assert "runtimeClassName" not in plain
    assert not [e for e in daemon_of(plain)["env"] if e["name"].startswith("NVIDIA")]


def test_what_is_on_nvme_outlives_an_upgrade(chart: helm_python.Chart) -> None:
    """The folders are the node's, of the same path before and after, and never in two daemons' hands."""
    for values in ({}, {"updateStrategy": "OnDelete"}, {"image": {"tag": "0.2.0"}, "config": {"cpu": {"ttl": "1min"}}}):
        spec = only(render(chart, values), "DaemonSet")["spec"]
        assert "maxSurge" not in spec["updateStrategy"].get("rollingUpdate", {})
        assert spec["updateStrategy"]["type"] == values.get("updateStrategy", "RollingUpdate")
        volumes = {v["name"]: v for v in spec["template"]["spec"]["volumes"]}
        assert volumes["kvtierd-nvme-0"]["hostPath"] == {"path": "/var/lib/kvtierd", "type": "DirectoryOrCreate"}
        assert not [c for c in spec["template"]["spec"]["initContainers"] if "rm" in c["command"]]


def test_memory_can_be_kept_over_an_upgrade(chart: helm_python.Chart, tmp_path: Path) -> None:
    plain = render(chart, {})
    assert "kvtierd-memory" not in str(plain) and loaded(plain, tmp_path).cpu.keep == ""
    objects = render(chart, {"cpu": {"keep": True, "keepHostPath": "/dev/shm/kv", "capacity": "16GiB"}})
    pod = only(objects, "DaemonSet")["spec"]["template"]["spec"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["kvtierd-memory"]["hostPath"] == {"path": "/dev/shm/kv", "type": "DirectoryOrCreate"}
    mounts = {m["name"]: m["mountPath"] for m in daemon_of(pod)["volumeMounts"]}
    assert mounts["kvtierd-memory"] == loaded(objects, tmp_path).cpu.keep
    (folders,) = pod["initContainers"]
    assert "/kept" in folders["command"], "the daemon does not run as root"


def test_a_changed_configuration_restarts_the_pods(chart: helm_python.Chart) -> None:
    def checksum(values: dict[str, Any]) -> str:
        pod = only(render(chart, values), "DaemonSet")["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum({}) == checksum({"podLabels": {"a": "b"}})
    assert checksum({}) != checksum({"config": {"cpu": {"ttl": "1min"}}})
    assert checksum({}) != checksum({"tenants": {"a": {"cpu_quota": "1GiB"}}})


def test_rules_and_dashboard_are_those_of_the_repository(chart: helm_python.Chart) -> None:
    rules = ROOT / "deploy" / "prometheus" / "rules.yaml"
    dashboard = ROOT / "deploy" / "grafana" / "kvtierd.json"
    assert (CHART / "files" / "rules.yaml").read_bytes() == rules.read_bytes(), "run make chart"
    assert (CHART / "files" / "dashboard.json").read_bytes() == dashboard.read_bytes(), "run make chart"
    manifests = render(chart, LARGE)
    assert only(manifests, "PrometheusRule")["spec"] == yaml.safe_load(rules.read_text())
    found = manifests["ConfigMap", "kv-dashboard"]
    assert json.loads(found["data"]["kvtierd.json"]) == json.loads(dashboard.read_text())
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "LLM"}


REFUSED = [
    ({"cpuu": {}}, "cpuu"),
    ({"mode": "statefulset"}, "mode"),
    ({"cpu": {"capacity": "64 gigs"}}, "capacity"),
    ({"cpu": {"capacity": "0GiB"}}, "capacity"),
    ({"cpu": {"capacity": 1024}}, "capacity"),
    ({"nvme": {"hostPaths": []}}, "hostPaths"),
    ({"nvme": {"hostPaths": ["relative"]}}, "hostPaths"),
    ({"nvme": {"hostPaths": ["/a", "/a"]}}, "hostPaths"),
    ({"memoryOverhead": "0GiB"}, "memoryOverhead"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"image": {"digest": "sha256:abc"}}, "digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"metrics": {"port": 80}}, "port"),
    ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
    ({"metrics": {"dashboard": {"folder": "x"}}}, "folder"),
    ({"config": {"gpu": {}}}, "gpu"),
    ({"config": {"tenants": {"a": {}}}}, "tenants"),
    ({"tenants": {"a": {"cpu_quota": {"of": "1GiB"}}}}, "cpu_quota"),
    ({"listen": {"port": 443}}, "port"),
    ({"tls": {"secretName": "Not_A_Name"}}, "secretName"),
    ({"tokens": {"secretName": "Not_A_Name"}}, "secretName"),
    ({"sidecar": {"volume": "nfs"}}, "volume"),
    ({"sidecar": {"connector": {"tenant": "a"}}}, "'tenant' does not match"),
    ({"podDisruptionBudget": {"minAvailable": "50%"}}, "minAvailable"),
    ({"networkPolicy": {"metricsFrom": [{}]}}, "metricsFrom"),
    ({"updateStrategy": "Recreate"}, "updateStrategy"),
    ({"socketHostPath": "/run/kvtierd/"}, "socketHostPath"),
    ({"maxUnavailable": 0}, "maxUnavailable"),
]


@pytest.mark.parametrize("values, culprit", REFUSED, ids=[f"{i}-{culprit.split()[0]}" for i, (_, culprit) in enumerate(REFUSED)])
def test_schema_refuses(chart: helm_python.Chart, values: dict[str, Any], culprit: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=culprit):
        chart.validate_schema(values)


def test_every_section_of_the_configuration_can_be_set(chart: helm_python.Chart) -> None:
    """But tenants, which have a value of their own."""
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]["config"]["properties"]
    assert set(properties) == set(Config.model_fields) - {"tenants"}


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("cpu", "capacity", "1GiB"),
        ("nvme", "folders", ["/other"]),
        ("server", "socket", "/x"),
        ("server", "metrics", ":1"),
        ("server", "listen", ":2"),
        ("server", "tls_key", "/k"),
        ("server", "token_file", "/t"),
    ],
)
def test_keys_that_the_chart_works_out_are_refused(chart: helm_python.Chart, section: str, key: str, value: object) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=f"config.{section}.{key} is worked out by the chart"):
        chart.render({"config": {section: {key: value}}}, name="release", namespace="inference")


@pytest.mark.parametrize(
    "values, text",
    [
        ({"listen": {"port": 9460}}, "set tls.secretName to a Secret with tls.crt and tls.key, or listen.insecure to true"),
        ({"tls": {"secretName": "a"}}, "set listen.port too, or leave them out"),
        ({"listen": {"insecure": True}}, "set listen.port too, or leave them out"),
        ({"listen": {"port": 9460, "insecure": True}, "tls": {"clientCA": True}}, "tls.clientCA takes ca.crt of the Secret"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "the DaemonSet has metrics.serviceMonitor"),
        ({"mode": "sidecar", "metrics": {"serviceMonitor": {"enabled": True}}}, "pods with a sidecar have metrics.podMonitor"),
        ({"mode": "sidecar", "metrics": {"podMonitor": {"enabled": True}}}, "metrics.podMonitor.selector has to name labels"),
        ({"mode": "sidecar", "networkPolicy": {"enabled": True}}, "a sidecar is under the policy of its pod"),
        ({"mode": "sidecar", "podDisruptionBudget": {"enabled": True}}, "have that of their own chart"),
        ({"mode": "sidecar", "sidecar": {"volume": "claim"}}, "name an existing claim in sidecar.claimName"),
    ],
)
def test_what_does_not_fit_together_is_refused(chart: helm_python.Chart, values: dict[str, Any], text: str) -> None:
    chart.validate_schema(values)
    with pytest.raises(helm_python.HelmRenderError, match=text):
        chart.render(values, name="release", namespace="inference")


@pytest.mark.parametrize("name", VALUES)
def test_lint(name: str) -> None:
    result = helm_python.lint(CHART, VALUES[name], strict=True)
    assert not result["errors"]
    worse_than_advice = [m for m in result["messages"] if m["severity"] > 1]
    assert not worse_than_advice


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    example = yaml.safe_load((EXAMPLE / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    [dependency] = example["dependencies"]
    assert dependency["version"] == f">={chart['version']}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"VLLM_VERSION ?= {example['appVersion']}\n" in makefile, "the example runs the vLLM that is tested"
