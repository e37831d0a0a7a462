"""One target in this process: ``python -m tests.fuzz.one NAME SECONDS``. With Atheris where it is installed, else with Hypothesis.

Nothing of kvtierd is imported before Atheris can follow it.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "out" / "fuzz"
MAX_BYTES = 8192
MEMORY_MIB = 2048
"""Peak of the process; an input that goes above it has failed."""
HANG_S = 60


def with_atheris(name: str, seconds: int) -> None:
    """Run until the time is over or an input fails; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["kvtierd"], exclude=["kvtierd.v1"]):
        from tests.fuzz.targets import CORPUS, TARGETS, corpus_of

    corpus = corpus_of(name)

    def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
        """Every other input is made of the corpus itself, as the fuzzer forgets what runs through no new line."""
        draw = random.Random(seed)
        return bytes(atheris.Mutate(draw.choice(corpus)[:max_bytes] if draw.random() < 0.5 else data, max_bytes))

    with tempfile.TemporaryDirectory() as work:
        target = TARGETS[name](Path(work))
        grown = FOUND / "corpus" / name
        grown.mkdir(parents=True, exist_ok=True)
        options = [
            f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MEMORY_MIB}", f"-timeout={HANG_S}",
            f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1", "-reload=0", "-len_control=0",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options, str(grown), str(CORPUS / name)], target, custom_mutator=mutated)
        atheris.Fuzz()


def with_hypothesis(name: str, seconds: int) -> None:
    """Changes of the corpus, none of which it learns from. Raises what is a fault, after the input that shows it."""
    from hypothesis import HealthCheck, given, settings

    from tests.fuzz.changes import changed
    from tests.fuzz.targets import TARGETS, corpus_of

    until_s = time.monotonic() + seconds
    count = 0
    with tempfile.TemporaryDirectory() as work:
        target = TARGETS[name](Path(work))

        @settings(max_examples=200, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(changed(corpus_of(name)))
        def tries(data: bytes) -> None:
            nonlocal count
            count += 1
            target(data)

        while time.monotonic() < until_s:
            tries()
        print(f"{count} inputs")
        if hasattr(target, "close"):
            target.close()


if __name__ == "__main__":
    logging.getLogger("kvtierd").addHandler(logging.NullHandler())  # what is refused is told, thousands of times
    run = with_atheris if importlib.util.find_spec("atheris") else with_hypothesis
    run(sys.argv[1], int(sys.argv[2]))
