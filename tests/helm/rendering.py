"""Charts rendered by Helm's own library, and every object held against the schema of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import jsonschema  # kubernetes-validate brings it
import kubernetes_validate
import yaml

from kvtierd.config import Config, load_config, parse_size

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvtierd"
EXAMPLE = ROOT / "helm" / "vllm-kvtierd"
KUBERNETES = ("1.29", "1.33")

Manifests = dict[tuple[str, str], dict[str, Any]]
"""By kind and name."""

_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_RELABELING = _closed(
    [],
    sourceLabels={"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}},
    targetLabel={"type": "string"},
    replacement={"type": "string"},
    regex={"type": "string"},
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
_ENDPOINTS = {
    "type": "array",
    "minItems": 1,
    "items": _closed(
        ["port"],
        port={"type": "string"},
        path={"type": "string"},
        interval=_DURATION,
        relabelings={"type": "array", "items": _RELABELING},
    ),
}
_RULE = _closed(
    ["expr"],
    record={"type": "string"},
    alert={"type": "string"},
    expr={"type": ["string", "integer"]},
    labels=_STRINGS,
    annotations=_STRINGS,
    **{"for": _DURATION},
)
_GROUP = _closed(
    ["name", "rules"],
    name={"type": "string"},
    interval=_DURATION,
    rules={"type": "array", "items": _RULE, "minItems": 1},
)
_MONITOR = {
    "selector": _closed(["matchLabels"], matchLabels={**_STRINGS, "minProperties": 1}),
    "namespaceSelector": _closed([], matchNames={"type": "array", "items": {"type": "string"}}),
}
OPERATOR: dict[str, dict[str, Any]] = {
    "ServiceMonitor": _closed(["selector", "endpoints"], **_MONITOR, endpoints=_ENDPOINTS),
    "PodMonitor": _closed(["selector", "podMetricsEndpoints"], **_MONITOR, podMetricsEndpoints=_ENDPOINTS),
    "PrometheusRule": _closed(["groups"], groups={"type": "array", "items": _GROUP}),
}
"""The Prometheus operator's kinds (monitoring.coreos.com/v1), as far as the charts use them; any other field is refused."""


def validate(manifest: dict[str, Any]) -> None:
    """Raises unless the object is valid: strictly by the schemas of an old and a new Kubernetes, or by ``OPERATOR``."""
    kind = manifest["kind"]
    if kind not in OPERATOR:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(manifest["metadata"]) <= {"name", "namespace", "labels", "annotations"}
    jsonschema.validate(manifest["spec"], OPERATOR[kind])


def render(chart: helm_python.Chart, values: dict[str, Any], name: str = "release") -> Manifests:
    """All objects of a chart, each validated."""
    chart.validate_schema(values)
    texts = chart.render(values, name=name, namespace="inference")
    manifests = [m for path, text in texts.items() if path.endswith(".yaml") for m in yaml.safe_load_all(text) if m]
    found: Manifests = {}
    for manifest in manifests:
        validate(manifest)
        assert manifest["metadata"]["namespace"] == "inference"
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == name
        key = (manifest["kind"], manifest["metadata"]["name"])
        assert key not in found
        found[key] = manifest
    return found


def only(manifests: Manifests, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    [found] = [manifest for (k, _), manifest in manifests.items() if k == kind]
    return found


def kinds(manifests: Manifests) -> list[str]:
    """Kinds of all objects, sorted."""
    return sorted(kind for kind, _ in manifests)


def config_text(manifests: Manifests) -> str:
    """The one kvtierd.toml."""
    [text] = [m["data"]["kvtierd.toml"] for m in manifests.values() if "kvtierd.toml" in m.get("data", {})]
    return str(text)


def loaded(manifests: Manifests, folder: Path) -> Config:
    """The configuration, as the daemon reads it."""
    path = folder / "kvtierd.toml"
    path.write_text(config_text(manifests))
    return load_config(path, env={})


def memory_bytes(quantity: str) -> int:
    """Bytes of a quantity such as "66Gi"."""
    assert quantity.endswith("i"), quantity
    return parse_size(quantity + "B")


def daemon_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The daemon's container in a pod's spec, sidecar or not."""
    [found] = [c for c in pod["containers"] + pod.get("initContainers", []) if c["name"] == "kvtierd"]
    return dict(found)


def mounts_of(container: dict[str, Any], pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Volumes of a pod by where a container mounts them. Every mount has its volume, and each path is mounted once."""
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert len(volumes) == len(pod["volumes"])
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
    assert len(mounts) == len(container["volumeMounts"])
    return mounts


def check_daemon(pod: dict[str, Any], config: Config) -> None:
    """What holds for every pod with a daemon: confinement, memory, folders, ports, probes and time to drain."""
    container = daemon_of(pod)
    context = container["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] > 0
    assert context["readOnlyRootFilesystem"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] > config.server.drain_timeout
    resources = container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert memory_bytes(resources["limits"]["memory"]) >= config.cpu.capacity + (1 << 30)
    mounts = mounts_of(container, pod)
    assert str(config.server.socket.parent) in mounts
    if config.nvme.capacity:
        assert {str(folder) for folder in config.nvme.folders} <= set(mounts)
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    host, _, number = config.server.metrics.rpartition(":")
    assert host == "0.0.0.0"
    live = container["livenessProbe"]["httpGet"]
    assert (live["path"], ports[live["port"]]) == ("/healthz", int(number))
    assert {"name": "KVTIERD_CONFIG", "value": "/etc/kvtierd/kvtierd.toml"} in container["env"]
    assert "configMap" in mounts["/etc/kvtierd"]
    for folders in (c for c in pod.get("initContainers", []) if "chown" in c.get("command", [])):
        assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert folders["command"][1] == f"{context['runAsUser']}:{context['runAsGroup']}"
        owned = set(folders["command"][2:])
        assert owned == {path for path in mounts if "hostPath" in mounts[path]} == {m["mountPath"] for m in folders["volumeMounts"]}
