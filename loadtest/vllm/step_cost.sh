#!/usr/bin/env bash
# step_cost.py against a daemon of its own with CPU memory alone, all of it prefaulted before the first step.
#   loadtest/vllm/step_cost.sh CAPACITY [arguments of step_cost.py]      e.g. step_cost.sh 4GiB --peer --output step_cost.json
# A small CAPACITY is full after the first round, as that of a daemon that has run for a while is; a large one grows all the while.
set -euo pipefail
capacity=${1:?usage: step_cost.sh CAPACITY [arguments of step_cost.py]}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d)
trap 'kill "$daemon" 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m kvtierd serve --set cpu.capacity="$capacity" --set nvme.capacity=0 --set server.socket="$work/k.sock" \
    --set server.metrics= > "$work/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 100); do [ -S "$work/k.sock" ] && break; sleep 0.1; done
sleep 10 # prefaulting
python3 loadtest/vllm/step_cost.py --address "unix:$work/k.sock" "$@"
python3 -m kvtierd status --address "unix:$work/k.sock" >&2
