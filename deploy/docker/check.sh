#!/usr/bin/env bash
# Try the image's steps where there is no Docker: lint the Dockerfile, install by the lock into a folder of its own, and let the
# daemon that is there serve, be healthy and stop: check.sh HADOLINT [VARIANT] [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
hadolint=$1 variant=${2:-cpu} version=$(sed -nE 's/^ARG BASE=python:([0-9.]+)-.*/\1/p' deploy/docker/Dockerfile)
python=${3:-$(command -v "python$version" || true)}

"$hadolint" --failure-threshold info deploy/docker/Dockerfile
echo "hadolint: nothing to say"
"$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" 2>/dev/null ||
    { echo "the locks are for Python $version, and ${python:-it} is not that one; name it: make container-check IMAGE_PYTHON=/path/to/python$version" >&2; exit 1; }

work=$(mktemp -d)
daemon=
cleanup() {
    [ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true
    rm -rf "$work"
}
trap cleanup EXIT
mkdir "$work/bin"
ln -s "$("$python" -c 'import sys; print(sys.executable)')" "$work/bin/python3"
# Of the tree, only what .dockerignore lets through.
mkdir "$work/source"
tar -c --exclude=__pycache__ $(sed -n 's/^!//p' deploy/docker/Dockerfile.dockerignore) | tar -x -C "$work/source"
PATH="$work/bin:$PATH" bash deploy/docker/install.sh "$work/source" "$variant" "$work/kvtierd"
du -sh "$work/kvtierd" | sed "s|$work/||"

port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
run="env -i PATH=$work/kvtierd/bin:/usr/bin:/bin HOME=$work XDG_RUNTIME_DIR=$work XDG_CACHE_HOME=$work/cache KVTIERD_CPU_CAPACITY=64MiB
    KVTIERD_NVME_CAPACITY=64MiB KVTIERD_NVME_RESERVE=0 KVTIERD_NVME_ALLOW_VOLATILE=true KVTIERD_SERVER_METRICS=127.0.0.1:$port"
healthy() { $run python3 -c "$(sed -nE 's/.*"-c", "(.*)"\]$/\1/p' deploy/docker/Dockerfile | sed "s/:9464/:$port/")"; }
$run kvtierd serve 2>"$work/log" &
daemon=$!
for _ in $(seq 100); do
    if $run kvtierd status >/dev/null 2>&1; then break; fi
    kill -0 "$daemon" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
done
$run kvtierd status >/dev/null
healthy
kill -TERM "$daemon"
wait "$daemon"
daemon=
if healthy 2>/dev/null; then echo "the health check does not see that the daemon has gone" >&2; exit 1; fi
echo "the $variant image's steps work: $(grep -c '"bom-ref"' "$work/kvtierd/sbom.cdx.json") parts in its list"
