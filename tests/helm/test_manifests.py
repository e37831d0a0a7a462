"""Goal: the manifests without Helm are valid and fit this version of the daemon and of its connector.

Method: each object is validated strictly; the configuration is loaded by the daemon's own code and compared with the pod around it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.rendering import (
    CHART,
    EXAMPLE,
    ROOT,
    Manifests,
    check_daemon,
    daemon_of,
    loaded,
    memory_bytes,
    mounts_of,
    render,
    validate,
)

pytestmark = pytest.mark.slow

FOLDER = ROOT / "deploy" / "k8s"
SIDECARS = ("sidecar", "sidecar-gpu")


def read(name: str) -> Manifests:
    manifests = [m for m in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()) if m]
    for manifest in manifests:
        validate(manifest)
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests}


def pod_of(manifests: Manifests) -> dict[str, Any]:
    for (kind, _), manifest in manifests.items():
        if kind == "Pod":
            return dict(manifest["spec"])
        if kind == "DaemonSet":
            return dict(manifest["spec"]["template"]["spec"])
    raise AssertionError("no pod")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_objects_are_valid_and_fit_the_configuration(path: Path, tmp_path: Path) -> None:
    manifests = read(path.stem)
    config = loaded(manifests, tmp_path)
    pod = pod_of(manifests)
    check_daemon(pod, config)
    container = daemon_of(pod)
    [config_map] = [name for kind, name in manifests if kind == "ConfigMap"]
    assert mounts_of(container, pod)["/etc/kvtierd"]["configMap"]["name"] == config_map
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    with helm_python.Chart.load(CHART) as chart:
        probe = daemon_of(pod_of(render(chart, {})))["livenessProbe"]
    assert {**container["livenessProbe"], "httpGet": None} == {**probe, "httpGet": None}, "as patient as the chart's"
    index = (config.cpu.capacity + config.nvme.capacity) // 2048
    assert memory_bytes(container["resources"]["limits"]["memory"]) >= config.cpu.capacity + index + (2 << 30)


@pytest.mark.parametrize("name", SIDECARS)
def test_engine_and_daemon_agree(name: str, tmp_path: Path) -> None:
    manifests = read(name)
    config, pod = loaded(manifests, tmp_path), pod_of(manifests)
    [engine] = pod["containers"]
    daemon = daemon_of(pod)
    assert daemon["restartPolicy"] == "Always"
    assert "startupProbe" not in daemon
    assert "readinessProbe" not in daemon
    assert {"name": "KVTIERD_ADDRESS", "value": f"unix:{config.server.socket}"} in engine["env"]
    folder = str(config.server.socket.parent)
    assert mounts_of(engine, pod)[folder] == mounts_of(daemon, pod)[folder]
    assert engine["securityContext"]["runAsUser"] == daemon["securityContext"]["runAsUser"]
    assert pod["securityContext"]["fsGroup"] == daemon["securityContext"]["runAsGroup"]
    transfer = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], transfer["kv_load_failure_policy"]) == ("KvtierdConnector", "recompute")


def test_the_gpu_variant_differs_by_the_gpu_alone() -> None:
    plain, variant = pod_of(read("sidecar")), pod_of(read("sidecar-gpu"))
    assert variant.pop("runtimeClassName") == "nvidia"
    daemon = next(c for c in variant["initContainers"] if c["name"] == "kvtierd")
    visible = [e for e in daemon["env"] if e["name"].startswith("NVIDIA_")]
    assert {e["name"] for e in visible} == {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    daemon["env"] = [e for e in daemon["env"] if e not in visible]
    engine = next(c for c in variant["containers"] if c["name"] == "vllm")
    engine["args"].remove("--gpu-memory-utilization=0.82")  # leaves the HBM tier its room
    assert variant == plain


def nvme_paths(manifests: Manifests, folder: Path) -> set[str]:
    """Folders of the node that the NVMe tier lies in; fails where one goes with the pod."""
    pod = pod_of(manifests)
    mounts = mounts_of(daemon_of(pod), pod)
    return {mounts[str(path)]["hostPath"]["path"] for path in loaded(manifests, folder).nvme.folders}


def test_an_upgrade_keeps_what_is_on_nvme(tmp_path: Path) -> None:
    """The next pod finds the folder of the last one, and no other daemon of the node has it."""
    manifests = read("daemonset")
    [daemonset] = [m for (kind, _), m in manifests.items() if kind == "DaemonSet"]
    assert daemonset["spec"]["updateStrategy"] == {"rollingUpdate": {"maxUnavailable": 1}}
    of_node = nvme_paths(manifests, tmp_path)
    assert of_node == {"/var/lib/kvtierd"}
    for name in SIDECARS:
        of_pod = nvme_paths(read(name), tmp_path)
        assert of_pod.isdisjoint(of_node)
        assert [kind for kind, _ in read(name)].count("Pod") == 1, "one pod by its name: two are never there at once"


# ---- docs/kubernetes.md


def test_values_on_the_page_render(tmp_path: Path) -> None:
    """Each block of values belongs to the chart that its first line names, and to a command that installs it."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n# (helm/[\w-]+)\n(.*?)```", page, re.S)
    assert [name for name, _ in blocks] == ["helm/kvtierd", "helm/vllm-kvtierd"]
    for source in (CHART, EXAMPLE):
        shutil.copytree(source, tmp_path / source.name)
    helm_python.dependency_update(tmp_path / EXAMPLE.name)
    for name, text in blocks:
        assert re.search(rf"^helm install \w+ {name} --namespace inference ", page, re.M)
        with helm_python.Chart.load(tmp_path / Path(name).name) as chart:
            manifests = render(chart, yaml.safe_load(text))
        [workload] = [m for (kind, _), m in manifests.items() if kind in ("DaemonSet", "Deployment")]
        check_daemon(workload["spec"]["template"]["spec"], loaded(manifests, tmp_path))


def test_paths_on_the_page_exist() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    paths = set(re.findall(r"`((?:helm|deploy)/[\w./-]+)`", page))
    assert len(paths) >= 6
    assert not [path for path in paths if not (ROOT / path).exists()]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in ("memoryOverhead", "drainTimeoutSeconds", "maxUnavailable", "updateStrategy"):
        assert key in values
        assert f"`{key}" in page
