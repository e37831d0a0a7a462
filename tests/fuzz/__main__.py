"""Fuzzing: ``python -m tests.fuzz --minutes 10``, shared among the targets, each in a process of its own.

An input that fails is printed and, with Atheris, written to ``out/fuzz``; put it into the corpus together with the mend.
``--seeds`` writes what the targets themselves begin with into the corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.one import FOUND, ROOT
from tests.fuzz.targets import CORPUS, TARGETS

WORK = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files are tried: a disk would take most of the time."""


def write_seeds() -> None:
    """Put each target's own inputs into the corpus."""
    for name, make in TARGETS.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            target = make(Path(work))
            for data in target.seeds():
                (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
            if hasattr(target, "close"):
                target.close()


def main() -> int:
    """Run the targets one after the other. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only this one; more than once for several")
    parser.add_argument("--seeds", action="store_true", help="write the targets' own inputs into the corpus, and do nothing else")
    args = parser.parse_args()
    if args.seeds:
        write_seeds()
        return 0
    FOUND.mkdir(parents=True, exist_ok=True)
    names = args.target or list(TARGETS)
    seconds = max(int(args.minutes * 60 / len(names)), 1)
    failed = []
    for name in names:
        print(f"==== {name}, {seconds} s", flush=True)
        # The fuzzer ends its process without cleaning up.
        with tempfile.TemporaryDirectory(prefix="kvtierd-fuzz-", dir=WORK) as work:
            command = [sys.executable, "-m", "tests.fuzz.one", name, str(seconds)]
            if subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": work}, check=False).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}; see above and {FOUND}" if failed else "nothing failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
