#!/usr/bin/env bash
# Puts Debian's prometheus and promtool into FOLDER/usr/bin, without installing them: nothing is started, nothing else changes.
#     tests/observability/install.sh FOLDER
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
[[ -x $folder/usr/bin/promtool && -x $folder/usr/bin/prometheus ]] && exit 0
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
    mkdir -p "$folder/usr/bin"
    ln -sf "$(command -v promtool)" "$(command -v prometheus)" "$folder/usr/bin/"
    exit 0
fi
command -v apt-get >/dev/null || { echo "install prometheus and promtool, so that they are in PATH" >&2; exit 1; }
echo "== fetching Debian's prometheus into $folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fetch() { (cd "$scratch" && apt-get -qq download prometheus 2>"$scratch/log"); }
fetch || { apt-get -qq update; fetch; } || { cat "$scratch/log" >&2; exit 1; }
mkdir -p "$folder"
dpkg-deb -x "$scratch"/prometheus_*.deb "$folder"
