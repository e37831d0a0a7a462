#!/usr/bin/env bash
# Measures everything again on this machine and writes bench.json, peers.json and README.md next to this script, in about five
# minutes. Leave the machine alone meanwhile.
#   KVTIERD_PYTHON  Python of the environment that has kvtierd (default .venv/bin/python); see also ../peers/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export KVTIERD_PYTHON=${KVTIERD_PYTHON:-$PWD/.venv/bin/python}
results=loadtest/results
"$KVTIERD_PYTHON" -m kvtierd bench --full --output $results/bench.json
bash loadtest/peers/run.sh --output $results/peers.json
"$KVTIERD_PYTHON" $results/render.py
