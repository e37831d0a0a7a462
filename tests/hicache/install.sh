#!/usr/bin/env bash
# Makes the environment of the tests of SGLang's hierarchical cache: a virtual environment with SGLang, what its cache needs to be
# imported without a GPU, kvtierd (editable) and pytest.
#
#     tests/hicache/install.sh VENV [SGLANG_VERSION] [PYTHON]
#
# An environment that was made from the same things is left alone.
set -euo pipefail

venv=${1:?usage: install.sh VENV [SGLANG_VERSION] [PYTHON]}
version=${2:-0.5.23}
python=${3:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

state=$({ cat "${BASH_SOURCE[0]}" "$root/pyproject.toml"; "$python" --version; echo "$version"; realpath -m "$venv"; } 2>&1 | sha256sum | cut -c1-16)
stamp=$venv/.made-$state
[[ -e $stamp ]] && exit 0

echo "== making $venv with SGLang $version"
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
quietly() { pip "$@" >"$venv/pip.log" 2>&1 || { tail -n 30 "$venv/pip.log" >&2; return 1; }; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

quietly download --no-deps --dest "$scratch" "sglang==$version"
# Kernels for GPUs are left out: the cache's pools, controller and threads run without them.
"$venv/bin/python" - "$scratch" <<'PY'
import pathlib, re, sys, zipfile

NEEDED = set(
    "torch torchvision transformers tokenizers compressed-tensors gguf numpy pillow psutil pydantic pyzmq msgspec orjson IPython requests regex "
    "sentencepiece tiktoken tqdm aiohttp packaging apache-tvm-ffi pybase64 python-multipart fastapi uvicorn einops setproctitle "
    "mistral_common python-dateutil zstandard xxhash".split()
)
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("sglang-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = archive.read(name).decode()
plain = [line for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M) if ";" not in line]
wanted = [line for line in plain if re.match(r"[\w.-]+", line)[0] in NEEDED]
(folder / "requirements.txt").write_text("\n".join(wanted) + "\n")
PY
quietly install --no-deps "$scratch"/sglang-*.whl
quietly install -r "$scratch/requirements.txt" -e "$root" dill \
    'pytest>=8.3,<10' 'pytest-timeout>=2.3,<3' 'pytest-asyncio>=1.0,<2' 'pytest-rerunfailures>=15,<17' 'pytest-xdist>=3.6,<4' 'hypothesis>=6.100,<7'
touch "$stamp"
