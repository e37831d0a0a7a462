#!/usr/bin/env bash
# Install kvtierd from a source tree, with what a lock names and nothing else: install.sh SOURCE VARIANT FOLDER
# FOLDER becomes a virtual environment without pip, with the list of its parts in sbom.cdx.json (CycloneDX).
set -euo pipefail
source=$1 variant=$2 folder=$3
locks=$source/deploy/docker/locks
exact=(--quiet --no-cache-dir --disable-pip-version-check --require-hashes --no-deps --only-binary :all:)
[ -f "$locks/$variant.txt" ] || { echo "there is no variant \"$variant\": cpu, cuda12 or cuda13" >&2; exit 2; }

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
python3 -m venv "$build/env"
"$build/env/bin/python" -m pip install "${exact[@]}" -r "$locks/build.txt"

python3 -m venv --without-pip "$folder"
pip() { "$build/env/bin/python" -m pip --python "$folder/bin/python" "$@"; }
pip install "${exact[@]}" -r "$locks/$variant.txt"
(cd "$source" && "$build/env/bin/python" -m hatchling build --target wheel --directory "$build/dist" >/dev/null)
pip install --quiet --no-cache-dir --no-index --no-deps "$build"/dist/*.whl
pip check
"$folder/bin/python" -m compileall -q "$folder/lib" >/dev/null || true # some packages carry files for other Pythons
"$folder/bin/kvtierd" --help >/dev/null
"$build/env/bin/cyclonedx-py" environment --output-format JSON --output-reproducible \
    --pyproject "$source/pyproject.toml" -o "$folder/sbom.cdx.json" "$folder/bin/python"
