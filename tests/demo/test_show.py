"""Goal: the view and the verdict say what happened.

Method: a progress made up by hand, drawn on a console that is a terminal and on one that is not.
"""

import io
from typing import Any

import pytest
from rich.console import Console

from kvtierd.demo import progress as p
from kvtierd.demo.progress import Progress, Sample, summary, verdict
from kvtierd.demo.report import result_table
from kvtierd.demo.view import View, curve, picture
from kvtierd.demo.worker import Outcome
from kvtierd.model import Tier
from kvtierd.replay.trace import Request

MIB = 1 << 20


def made_up() -> Progress:
    progress = Progress([Request(0.0, (1, 2)), Request(1.0, (1, 3))], clients=2)
    for at_s, cpu in ((0.0, 0), (1.0, 64), (2.0, 32)):
        used = {Tier.CPU: cpu * MIB, Tier.NVME: 2 * cpu * MIB}
        progress.add_sample(Sample(at_s, used, {Tier.CPU: MIB}, {Tier.CPU: 64 * MIB, Tier.NVME: 256 * MIB}))
    progress.outcomes.append(Outcome(0, 0.0, asked=2, saved=2))
    progress.set_counters({"demotions": 3.0})
    progress.killed_at_s = 1.1
    progress.end_boot()
    progress.set_counters({"demotions": 4.0})
    progress.back_at_s, progress.restarts, progress.recovered_blocks = 1.5, 1, 9
    progress.outcomes.append(Outcome(1, 2.0, asked=2, hits={Tier.NVME: 1}, saved=1))
    progress.say(1.1, "the daemon was killed [SIGKILL]")
    return progress


def drawn(what: Any) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(what)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_figures_are_summed_over_clients_and_boots() -> None:
    figures = summary(made_up())
    assert figures["demotions"] == 7
    assert figures["prefix_hit_ratio"] == figures["ideal_prefix_hit_ratio"] == 0.25
    assert figures["hit_ratio_by_tier"] == {"cpu": 0.0, "nvme": 0.25}
    assert figures["saved_gb"] == pytest.approx(3 * MIB / 1e9)
    assert figures["nvme_hits_after_restart"] == 1
    assert "25.0%" in drawn(result_table(figures))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({}, ""),
        ({"wrong": 1}, "1 wrong bytes"),
        ({"failure": "it broke"}, "it broke"),
        ({"missing": True}, "only 1 of 2"),
        ({"missing": True, "cut_short": True, "back_at_s": -1.0}, "nothing was loaded"),
        ({"restarts": 0}, "not restarted"),
        ({"back_at_s": 3.0}, "nothing was loaded from NVMe after the restart"),
    ],
)
def test_verdict_names_what_is_wrong(spoil: dict[str, Any], words: str) -> None:
    progress = made_up()
    for name, value in spoil.items():
        if name == "wrong":
            progress.outcomes[1].wrong_bytes = value
        elif name == "missing":
            del progress.outcomes[1]
        else:
            setattr(progress, name, value)
    found = verdict(progress, summary(progress), kill=True, nvme=True)
    assert words in found
    assert bool(found) == bool(words)


def test_live_view_shows_tiers_and_clients() -> None:
    progress = made_up()
    progress.attached[1] = False
    text = drawn(picture(progress))
    for words in ("32 of 64 MiB", "2/2", "demoted 7", "client-0: attached", "client-1: without a cache", "wrong bytes: 0"):
        assert words in text
    progress.back_at_s = None
    assert "daemon: killed" in drawn(picture(progress))


@pytest.mark.parametrize("terminal", [True, False])
def test_events_are_told_once(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    progress = made_up()
    with View(console) as view:
        view.show(progress)
        view.show(progress)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("the daemon was killed [SIGKILL]") == 1
    assert ("2/2 requests  CPU 32 MiB  NVME 64 MiB" in text) != terminal


def test_curve_covers_the_whole_time() -> None:
    samples = made_up().samples
    assert curve(samples, Tier.CPU, 3) == " █▄"
    assert curve(samples, Tier.CPU, 2) == " █"
    assert curve([], Tier.CPU, 4) == "    "


def test_samples_of_a_long_run_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "MAX_SAMPLES", 8)
    progress = Progress([], clients=1)
    for second in range(1000):
        progress.add_sample(Sample(float(second), {}, {}, {}))
    times = [s.at_s for s in progress.samples]
    assert 4 <= len(times) < 8
    assert times == sorted(times)
    assert times[-1] > 800


def test_killed_memory_is_empty_and_nvme_is_not() -> None:
    progress = made_up()
    progress.lose_memory(2.5)
    assert progress.samples[-1].used_bytes == {Tier.CPU: 0, Tier.NVME: 64 * MIB}
