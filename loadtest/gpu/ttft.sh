#!/usr/bin/env bash
# Time to first token on a GPU, side by side in one run: recomputing, vLLM's OffloadingConnector, and kvtierd (twice: the second
# engine finds what the first one saved). Writes one JSON line each to OUT/ttft.jsonl, and logs beside it.
#   loadtest/gpu/ttft.sh OUT [LENGTHS]          in an environment with vLLM, kvtierd and a GPU
set -euo pipefail
out=$(mkdir -p "${1:?usage: ttft.sh OUT [LENGTHS]}" && cd "$1" && pwd)
lengths=${2:-4096,16384,32768,65536}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d)
trap 'kill "$daemon" 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m kvtierd.cli serve --set cpu.capacity=40GiB --set nvme.capacity=0 --set server.socket="$work/k.sock" \
    --set server.metrics= > "$out/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 100); do [ -S "$work/k.sock" ] && break; sleep 0.1; done
ttft() { timeout 300 python3 loadtest/gpu/ttft.py "$@" --lengths "$lengths" --output "$out/ttft.jsonl" 2>> "$out/$1.log"; }
: > "$out/ttft.jsonl"
nvidia-smi --query-gpu=name,pcie.link.gen.current,pcie.link.width.current,driver_version --format=csv,noheader || true
ttft kvtierd --address "unix:$work/k.sock"
ttft kvtierd --address "unix:$work/k.sock" --label kvtierd-restart
ttft offload
ttft none
python3 -m kvtierd.cli status --address "unix:$work/k.sock" || true
