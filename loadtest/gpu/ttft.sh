#!/usr/bin/env bash
# Time to first token on a GPU, side by side in one run, one JSON line each to OUT/ttft.jsonl, and logs beside it.
#   loadtest/gpu/ttft.sh OUT [LENGTHS] [RUN...]          in an environment with vLLM, kvtierd and a GPU
# Runs, all but lmcache when none is named:
#   none     recomputing                      offload  vLLM's OffloadingConnector, CPU memory
#   cpu      kvtierd's CPU tier, twice: the second engine finds what the first one saved
#   hbm      kvtierd's HBM tier, likewise     fs       vLLM's tiers of CPU memory and files, twice
#   nvme     kvtierd's NVMe: saved by one engine, written down by a stop of the daemon, and each hit of a second engine read from disk
#   lmcache  an LMCache server that listens on port 5555 already (its address is LMCACHE_HOST, tcp://127.0.0.1)
# HITS of each length (4). With PYTHONHASHSEED set, vLLM 0.23's own hashes name the blocks, else the connector makes a chain of its own.
set -euo pipefail
out=$(mkdir -p "${1:?usage: ttft.sh OUT [LENGTHS] [RUN...]}" && cd "$1" && pwd)
lengths=${2:-4096,16384,32768,65536}
runs=("${@:3}")
[ ${#runs[@]} -gt 0 ] || runs=(cpu hbm offload none fs nvme)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
work=$(mktemp -d) # TMPDIR says on which disk
daemon=
stop() { [ -z "$daemon" ] || { kill "$daemon" 2>/dev/null && wait "$daemon" || true; daemon=; }; }
trap 'stop; rm -rf "$work"' EXIT
kvtierd() { python3 -m kvtierd "$@"; }
serve() { # NAME [--set KEY=VALUE...]
    rm -f "$work/k.sock"
    python3 -m kvtierd serve --set cpu.capacity=40GiB --set server.socket="$work/k.sock" --set server.metrics= "${@:2}" >> "$out/daemon-$1.log" 2>&1 &
    daemon=$!
    for _ in $(seq 200); do [ -S "$work/k.sock" ] && break; sleep 0.1; done
}
ttft() { timeout 300 python3 loadtest/gpu/ttft.py --hits "${HITS:-4}" "$@" --lengths "$lengths" --output "$out/ttft.jsonl" 2>> "$out/$1.log" || echo "failed: $*"; }
ours() { ttft kvtierd --address "unix:$work/k.sock" --label "$@"; }
nvidia-smi --query-gpu=name,pcie.link.gen.current,pcie.link.width.current,driver_version --format=csv,noheader || true
for run in "${runs[@]}"; do
    case $run in
    cpu)
        serve cpu --set nvme.capacity=0
        ours kvtierd
        ours kvtierd-restart
        ;;
    hbm)
        serve hbm --set nvme.capacity=0 --set hbm.capacity=16GiB --set hbm.ttl=never
        ours kvtierd-hbm
        kvtierd status --address "unix:$work/k.sock"
        ;;
    nvme)
        nvme=(--set nvme.capacity=24GiB --set nvme.folders="$work/nvme")
        serve nvme "${nvme[@]}"
        ours kvtierd-nvme-save --hits 1
        stop
        serve nvme "${nvme[@]}"
        ours kvtierd-nvme --hits 2 --before-hit "python3 -m kvtierd evict --address unix:$work/k.sock --tier cpu"
        ours kvtierd-nvme-gate --hits 2 --extra '{"kvtierd.gate": true}' \
            --before-hit "python3 -m kvtierd evict --address unix:$work/k.sock --tier cpu"
        kvtierd status --address "unix:$work/k.sock"
        ;;
    fs)
        mkdir -p "$work/fs"
        PYTHONHASHSEED=0 ttft fs --folder "$work/fs"
        sync # what this one wrote is to be read from the disk, not from the page cache
        [ ! -w /proc/sys/vm/drop_caches ] || echo 3 > /proc/sys/vm/drop_caches
        PYTHONHASHSEED=0 ttft fs --folder "$work/fs" --label fs-restart
        rm -rf "$work/fs"
        ;;
    lmcache)
        PYTHONHASHSEED=0 ttft lmcache --host "${LMCACHE_HOST:-tcp://127.0.0.1}"
        PYTHONHASHSEED=0 ttft lmcache --host "${LMCACHE_HOST:-tcp://127.0.0.1}" --label lmcache-restart
        ;;
    *) ttft "$run" ;;
    esac
    stop
done
