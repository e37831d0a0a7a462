#!/usr/bin/env bash
# Measures kvtierd and LMCache side by side and writes loadtest/out/peers.json.
# LMCache gets an environment of its own, built for the CPU (a minute or two, once).
#
#   loadtest/peers/run.sh [arguments of compare.py]
#   PYTHON          Python 3.11 or newer with venv (default python3)
#   KVTIERD_PYTHON  Python of the environment that has kvtierd (default .venv/bin/python)
#   PEERS_VENV      where LMCache's environment goes (default loadtest/out/lmcache-venv)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
version=0.5.6
python=${PYTHON:-python3}
kvtierd_python=${KVTIERD_PYTHON:-$root/.venv/bin/python}
venv=${PEERS_VENV:-$root/loadtest/out/lmcache-venv}

"$kvtierd_python" -c 'import kvtierd' 2>/dev/null || {
    echo "kvtierd is not installed for $kvtierd_python: run make venv, or set KVTIERD_PYTHON" >&2
    exit 2
}

if [ ! -e "$venv/.lmcache-$version" ]; then
    echo "== making $venv with LMCache $version"
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --no-input)
    # LMCache builds against the torch that is there, hence no build isolation and all that its build needs first.
    limits=$venv/constraints.txt
    printf '%s\n' 'torch==2.13.0' 'numpy<=2.2.6' 'setuptools<81' 'grpcio-tools==1.78.0' > "$limits"
    # The CPU wheel (2.13.0+cpu) wins over the one with CUDA wherever an index or a folder of wheels has it. Elsewhere name
    # one, for example TORCH_INDEX=https://download.pytorch.org/whl/cpu.
    "${pip[@]}" install -c "$limits" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
    "${pip[@]}" install -c "$limits" ninja packaging setuptools setuptools_scm wheel numpy grpcio-tools
    # Without GPU extensions; its native CPU parts are built.
    NO_GPU_EXT=1 SETUPTOOLS_SCM_PRETEND_VERSION=$version \
        "${pip[@]}" install -c "$limits" --no-build-isolation --no-binary lmcache "lmcache==$version"
    touch "$venv/.lmcache-$version"
fi

exec "$kvtierd_python" "$here/compare.py" --lmcache-venv "$venv" --output "$root/loadtest/out/peers.json" "$@"
