#!/usr/bin/env bash
# Resolve the locks again, to the newest versions that pyproject.toml allows: deploy/docker/lock.sh UV
# They are for Linux x86_64 and the Python of the image. Hashes are those of all files of a version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
uv=$1
locks=deploy/docker/locks
python=$(sed -nE 's/^ARG BASE=python:([0-9.]+)-.*/\1/p' deploy/docker/Dockerfile)
options=(--quiet --upgrade --generate-hashes --no-annotate --only-binary :all:
    --python-version "$python" --python-platform x86_64-manylinux_2_28
    --custom-compile-command "make lock")

resolve() { "$uv" pip compile "${options[@]}" "${@:2}" -o "$locks/$1.txt" && echo "$locks/$1.txt"; }

resolve build "$locks/build.in"
resolve cpu pyproject.toml --extra events --extra otel --extra encryption
# The GPU extras name torch for connectors, which live in an engine's environment; the daemon needs none.
resolve cuda12 pyproject.toml --extra events --extra otel --extra encryption --extra cuda12 --excludes <(echo torch)
resolve cuda13 pyproject.toml --extra events --extra otel --extra encryption --extra cuda13 --excludes <(echo torch)
