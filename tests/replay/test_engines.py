"""Goal: the load test under many engines sees what befalls the daemon, checks every byte, and says so where it was too slow itself.

Method: one short run of the command with faults, its report and figures; contents and schedules alone; made-up records of a client
side that was late.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtierd.lifetime import scratch_folder
from kvtierd.replay.trace import Request
from kvtierd.testing.daemon import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]
# Source distributions have no load tests.
contents = pytest.importorskip("loadtest.engines.contents")
engine = pytest.importorskip("loadtest.engines.engine")
figures = pytest.importorskip("loadtest.engines.figures")
plan = pytest.importorskip("loadtest.engines.plan")
main = pytest.importorskip("loadtest.engines.__main__")
run = pytest.importorskip("loadtest.engines.run")
watch = pytest.importorskip("loadtest.engines.watch")

SETTINGS = plan.Settings(10, 1, 2, 3, 4, 2, 4096, "16MiB", "16MiB", 0.0, 1, 0.1)
TRAFFIC = "--rate 15 --turns 3 --think-s 0.5 --tokens-per-s 200 --tenants 2 --system-prompts 2 --contexts 4 --context-tokens 4000"


@pytest.mark.slow
def test_a_run_with_faults(tmp_path: Path) -> None:
    faults = "1.5:stop:1.4 4:client 5.5:kill:0.2"
    command = [sys.executable, "-m", "loadtest.engines", "--seconds", "8", "--speedup", "1", "--faults", faults, *TRAFFIC.split()]
    sizes = ["--engines", "2", "--cpu", "4MiB", "--nvme", "64MiB", "--late-limit", "5", "--output", tmp_path]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["wrong_bytes"] == 0
    assert found["checked_bytes"] > 10 << 20
    assert set(found["hits"]["by_tier"]) == {"cpu", "nvme"}
    assert 0.2 < found["hits"]["hit_ratio"] <= found["parameters"]["ideal_hit_ratio"]
    stop, client, kill = found["faults"]
    assert (stop["kind"], client["kind"], kill["kind"]) == ("stop", "client", "kill")
    assert stop["hits_again_after_s"] is not None
    assert client["hits_again_after_s"] is not None
    # A busy machine may take until the end of the run to start the daemon again.
    assert kill["hits_again_after_s"] is not None or (kill["status_again_after_s"] or 99.0) > 1.0
    assert found["troubles"]["lookup: UNAVAILABLE"] > 0
    stopped = max((s["ms"]["lookup"] for s in found["by_second"] if s["ms"].get("lookup")), key=lambda ms: ms["p50"])
    assert stopped["count"] > 4, "two engines go on asking a daemon that stands still"
    assert stopped["p50"] > 200, "and each of their requests has waited for it"
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 6 + len(set(found["latency"]) - {"request"})
    assert not any(word in report for word in ("<script", " src=", ' href="http', "<link", "@import"))


def test_contents_tell_tenants_keys_and_shards_apart() -> None:
    block = np.zeros(512, np.uint64)
    contents.fill(memoryview(block).cast("B"), "a", b"k" * 32, 0)
    assert contents.wrong_bytes(block, "a", b"k" * 32, 0) == 0
    for tenant, key, shard in (("b", b"k" * 32, 0), ("a", b"l" * 32, 0), ("a", b"k" * 32, 1)):
        assert contents.wrong_bytes(block, tenant, key, shard) > 3000
    block[7] ^= np.uint64(1)
    assert contents.wrong_bytes(block, "a", b"k" * 32, 0) == 1
    assert contents.wrong_bytes(np.roll(block, 1), "a", b"k" * 32, 0) > 3000


@pytest.mark.parametrize(
    "text, why",
    [("5:kil", "5:kil"), ("kill:5", "kill:5"), ("5:kill:x", "5:kill:x"), ("-1:kill", "time"), ("1:kill:5 3:stop", "at 3 s")],
)
def test_schedules_that_cannot_be(text: str, why: str) -> None:
    with pytest.raises(plan.PlanError, match=why):
        plan.parse_faults(text)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ("--seconds nan", "not a number from"),
        ("--engines 0", "not a whole number from 1"),
        ("--late-limit nan", "not a number from"),
        ("--cpu lots", "not a size"),
        ("--nvme -1", "a size lies between"),
        ("--trace x --workload agents", "not allowed with"),
        ("--trace x --rate 2", "a trace has no options of a generator"),
        ("--rate 0", "--rate: '0' is not a number from"),
        ("--seconds 20 --faults 32:stop", "LOAD_FAULTS"),
        ("--mix save", "--mix: 'save' is not STEP=WEIGHT with a step of load, save, evict"),
        ("--mix save=1,lod=2", "'lod=2' is not STEP=WEIGHT"),
        ("--mix save=1,load=x", "'load=x' is not STEP=WEIGHT"),
        ("--mix=", "--mix: '' is not STEP=WEIGHT"),
        ("--mix save=-1", "not a number from 0 on"),
        ("--mix save=inf", "not a number from 0 on"),
        ("--mix save=1,save=2", "save is there twice"),
        ("--mix save=0,evict=0", "all weights are 0"),
        ("--mix save=1 --evict 0.1", "not allowed with"),
        ("--seconds 20 --faults 3:stop:9999", "does not fit into the run"),
        ("--conversations=1 --output {file}", "results cannot be written to --output"),
        ("--conversations=1 --output {file}/below", "results cannot be written to --output"),
        ("--conversations=1 --output {out} --folder {file}", "--folder .* cannot be used"),
        ("--conversations=1 --output {out} --folder {used}", "is not empty"),
    ],
)
def test_runs_that_cannot_be_are_refused_before_they_begin(
    arguments: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "Run", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "k").touch()
    file.touch()
    with pytest.raises(SystemExit) as ended:
        main.main(arguments.format(used=used, file=file, out=tmp_path / "out").split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.search(why, said), said


def test_a_generator_makes_as_many_conversations_as_it_is_told() -> None:
    for spelling in (["--conversations=3"], ["--conversations", "3"]):
        requests, _ = plan.generated("rag-chat", 1e9, [*spelling, "--turns", "1"])
        assert len(requests) == 3


def answers(daemon: DaemonProcess) -> bool:
    try:
        return bool(daemon.status().version)
    except grpc.RpcError:
        return False


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_no_daemon(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "f"
    command = [sys.executable, "-m", "loadtest.engines", "--seconds", "600", "--folder", str(folder), "--output", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        daemon = DaemonProcess(folder)
        assert process.stdout is not None
        process.stdout.readline()  # the first line of progress: all is running
        assert daemon.status().sessions
        process.send_signal(number)
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code and "Traceback" not in said, said
    until_s = time.monotonic() + 60
    while (still := answers(daemon)) and time.monotonic() < until_s:  # the kernel kills it in its own time
        time.sleep(0.1)
    assert not still


def requests(count: int) -> list[Any]:
    return [Request(n / 10, (n % 7, n % 7 + 1), "t") for n in range(count)]


def test_requests_of_a_mix_do_one_step_each_by_its_weights() -> None:
    mix = plan.parse_mix(" save = 20, load=70,evict=10")
    assert figures.mix_text(mix) == "save=20,load=70,evict=10"
    items = plan.items_of(requests(2000), replace(SETTINGS, mix=mix))
    counts = Counter(i.steps for i in items)
    for step, share in ((plan.Step.SAVE, 0.2), (plan.Step.LOAD, 0.7), (plan.Step.EVICT, 0.1)):
        assert counts.pop((step,)) / 2000 == pytest.approx(share, abs=0.05)
    assert not counts
    assert {i.steps for i in plan.items_of(requests(50), replace(SETTINGS, mix=plan.parse_mix("save=1,load=0")))} == {
        (plan.Step.SAVE,)
    }
    engines = {i.steps for i in plan.items_of(requests(200), replace(SETTINGS, evict=0.5))}
    assert engines == {plan.AS_AN_ENGINE, (*plan.AS_AN_ENGINE, plan.Step.EVICT)}


def test_what_a_cache_could_find_of_a_mix() -> None:
    """Only loads ask, and only what was saved can be found."""

    def item(number: int, step: Any, *blocks: int) -> Any:
        return plan.Item(number, number / 10, "t", blocks, (step,))

    load, save, evict = plan.Step.LOAD, plan.Step.SAVE, plan.Step.EVICT
    items = [item(0, load, 1, 2), item(1, save, 1, 2), item(2, load, 1, 2, 3), item(3, evict, 1, 2), item(4, load, 1)]
    assert figures.ideal(items) == pytest.approx(3 / 6)


@pytest.mark.slow
def test_a_run_with_a_mix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.engines", "--seconds", "4", "--speedup", "1", "--mix", "save=40,load=50,evict=10"]
    sizes = ["--engines", "2", "--cpu", "4MiB", "--nvme", "64MiB", "--late-limit", "5", "--output", tmp_path]
    done = subprocess.run([*command, *TRAFFIC.split(), *sizes], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    calls = {name: row["count"] for name, row in found["latency"].items()}
    made = calls["request"]
    assert calls["lookup"] + calls["save"] + calls["evict"] == made, "one step each"
    assert calls["save"] > made / 4 and calls["evict"] and 0 < calls["load"] <= calls["lookup"]
    assert found["saved_blocks"] > 0 and found["wrong_bytes"] == 0
    assert 0 < found["hits"]["hit_ratio"] <= found["parameters"]["ideal_hit_ratio"]
    assert found["parameters"]["mix"] == "save=40,load=50,evict=10"


def test_a_killed_run_leaves_a_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.engines", "--seconds", "600", "--output", str(tmp_path / "out")]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first line of progress: all is running
        process.kill()
    assert list(tmp_path.glob("kvtierd-load-*/nvme"))
    with scratch_folder(tmp_path, "kvtierd-load-") as folder:
        assert list(tmp_path.glob("kvtierd-load-*")) == [folder]


def test_schedules_and_shares() -> None:
    assert plan.parse_faults("9:client 2:disk-full:4 3:stop") == (
        plan.Fault(2, plan.FaultKind.DISK_FULL, 4),
        plan.Fault(3, plan.FaultKind.STOP, 2),
        plan.Fault(9, plan.FaultKind.CLIENT, 2),
    )
    items = [plan.Item(n, n / 10, "t", (1,), plan.AS_AN_ENGINE) for n in range(10)]
    shares = plan.split(items, SETTINGS)
    assert [i.number for i in shares[0]] == [0, 2, 3, 5, 6, 8, 9], "engines 0 and 2 of three"
    assert [i.number for i in shares[1]] == [1, 4, 7]


def record(number: int, late_s: float) -> Any:
    due_s = number / 10
    return engine.Record(number, "t", due_s, due_s + late_s, due_s + late_s, due_s + late_s + 0.01, 1, (), {}, 0, 0, 0, {})


def test_a_load_generator_that_was_too_slow_says_so() -> None:
    progress = run.Progress(
        20, 2.0, records=[record(n, 0.001) for n in range(20)], busy={1: [engine.Busy(t, 0.3 * t) for t in range(5)]}
    )
    assert figures.generator(progress, 0.1, SETTINGS)["problems"] == []
    late = replace(progress, records=[record(n, 0.5) for n in range(20)])
    assert "handed on late" in figures.generator(late, 0.1, SETTINGS)["problems"][0]
    assert figures.latencies(late.records)["request"]["ms"]["p50"] == pytest.approx(510), "its delay is in the latency, not hidden"
    busy = replace(progress, busy={1: [engine.Busy(t, 0.95 * t) for t in range(5)]})
    assert "95% of a core" in figures.generator(busy, 0.1, SETTINGS)["problems"][0]
    short = replace(progress, total=21)
    assert "1 of 21 requests were never made" in figures.generator(short, 0.1, SETTINGS)["problems"][0]
    killed = replace(short, events=[watch.Event(plan.Fault(1, plan.FaultKind.CLIENT), 1.0, 1.0)])
    assert figures.generator(killed, 0.1, SETTINGS)["problems"] == []
