"""Goal: status shows every figure, survives hostile names, and --watch waits for a daemon that has gone.

Method: a fake admin service answers with made-up figures; --watch runs with a sleep that ends after some rounds.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from click.testing import Result
from rich.console import Console

from kvtierd.v1 import admin_pb2, kvtier_pb2

Kvtierd = Callable[..., Result]
status_module = importlib.import_module("kvtierd.cli.status")


LIMITS = [
    admin_pb2.TenantTier(tier=kvtier_pb2.TIER_CPU, quota_bytes=4, reserve_bytes=1, evictions={"quota": 2}),
    admin_pb2.TenantTier(tier=kvtier_pb2.TIER_NVME),
]


def answer(**changes: Any) -> admin_pb2.GetStatusResponse:
    found = admin_pb2.GetStatusResponse(
        boot_epoch=5,
        version="1.2.3",
        uptime_s=3725,
        blocks=1234,
        tiers=[
            admin_pb2.TierStatus(tier=kvtier_pb2.TIER_CPU, capacity_bytes=2**30, used_bytes=2**29, copies=12, path="memfd"),
            admin_pb2.TierStatus(
                tier=kvtier_pb2.TIER_NVME,
                capacity_bytes=2**32,
                path="o_direct",
                suspended="I/O errors",
                folders=[admin_pb2.FolderStatus(path="/a"), admin_pb2.FolderStatus(path="/b", problem="lost: \x1b[2Jgone")],
            ),
        ],
        tenants=[
            admin_pb2.TenantStatus(
                tenant="acme", blocks=3, used_bytes=[0, 1, 2], quota_bytes=[0, 4, 5], hits=3, misses=1, limits=LIMITS
            )
        ],
        sessions=[admin_pb2.SessionStatus(id="s1", client_name="vllm-0", tenant="acme", model="m", pid=42, age_s=1)],
        counters={"kvtierd_hits_total": 3.0, "kvtierd_misses_total": 0.0},
    )
    found.MergeFrom(admin_pb2.GetStatusResponse(**changes))
    return found


def test_text(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStatus"] = answer(draining=True)
    result = kvtierd("status", "--address", admin.address)
    assert result.exit_code == 0, result.output
    for part in ("kvtierd 1.2.3", "1 h 2 min", "1,234 blocks", "512 MiB", "50 %", "o_direct", "vllm-0", "75 %", "draining"):
        assert part in result.output, part
    assert "nvme takes nothing: I/O errors" in result.output
    assert "folder /b is lost: " in result.output and "folder /a" not in result.output
    assert "kvtierd_hits_total" in result.output
    assert "kvtierd_misses_total" not in result.output, "counters at zero only fill the screen"


def test_json_has_everything(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStatus"] = answer()
    data = json.loads(kvtierd("status", "--address", admin.address, "--json").output)
    assert data["tiers"][0]["tier"] == "cpu"
    assert data["tiers"][1]["suspended"] == "I/O errors"
    assert data["tiers"][1]["folders"][0] == {"path": "/a", "problem": ""}
    assert data["tenants"][0]["used_bytes"] == {"hbm": 0, "cpu": 1, "nvme": 2}
    quotas = {tier: limit["quota_bytes"] for tier, limit in data["tenants"][0]["limits"].items()}
    assert quotas == {"cpu": 4, "nvme": None}, "none and nothing differ"
    assert data["tenants"][0]["tenant_class"] == "standard"
    assert data["sessions"][0]["pid"] == 42
    assert data["counters"] == {"kvtierd_hits_total": 3.0, "kvtierd_misses_total": 0.0}
    for message, shown in (
        (admin_pb2.GetStatusResponse.DESCRIPTOR, data),
        (admin_pb2.TierStatus.DESCRIPTOR, data["tiers"][0]),
        (admin_pb2.TenantStatus.DESCRIPTOR, data["tenants"][0]),
        (admin_pb2.TenantTier.DESCRIPTOR, data["tenants"][0]["limits"]["cpu"] | {"tier": "its key"}),
    ):
        assert {f.name for f in message.fields} == set(shown), "a new field of the protocol is not shown"


def test_one_tenant_is_shown_without_the_others(admin: Any, kvtierd: Kvtierd) -> None:
    others = {
        "tenants": [admin_pb2.TenantStatus(tenant="second", blocks=9)],
        "sessions": [admin_pb2.SessionStatus(id="s2", client_name="elsewhere", tenant="second")],
        "tenant_problems": {"second": "cpu_reserve: too much", "third": "nvme_reserve: too much"},
    }
    admin.answers["GetStatus"] = answer(**others)
    everything = kvtierd("status", "--address", admin.address).output
    assert "not in force for second: cpu_reserve: too much" in everything and "elsewhere" in everything
    admin.answers["GetStatus"] = answer(**others)
    data = json.loads(kvtierd("status", "--address", admin.address, "--tenant", "acme", "--json").output)
    assert [t["tenant"] for t in data["tenants"]] == ["acme"]
    assert [s["client_name"] for s in data["sessions"]] == ["vllm-0"]
    assert data["counters"] == {}, "the totals are everybody's"
    assert data["tenant_problems"] == {}
    text = kvtierd("status", "--address", admin.address, "--tenant", "acme").output
    assert "acme" in text
    assert "elsewhere" not in text and "not in force" not in text
    unseen = kvtierd("status", "--address", admin.address, "--tenant", "third")
    assert unseen.exit_code == 0 and "not in force for third: nvme_reserve" in unseen.output


def test_a_tenant_that_nobody_knows_is_an_error(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStatus"] = answer()
    result = kvtierd("status", "--address", admin.address, "--tenant", "acne")
    assert result.exit_code == 1
    assert "knows no tenant 'acne'" in result.output


def test_names_of_clients_cannot_steer_the_terminal(admin: Any, kvtierd: Kvtierd) -> None:
    evil = "\x1b[2J\x07[red]x[/red]"
    admin.answers["GetStatus"] = answer(sessions=[admin_pb2.SessionStatus(id="s2", client_name=evil)])
    output = kvtierd("status", "--address", admin.address).output
    assert "\x1b" not in output
    assert "\x07" not in output
    assert "?[2J?" in output
    assert "[red]" in output.replace("\n", "").replace(" ", ""), "names are not markup"


def test_many_sessions_are_counted_not_listed(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStatus"] = answer(sessions=[admin_pb2.SessionStatus(id=f"x{n}") for n in range(200)])
    output = kvtierd("status", "--address", admin.address).output
    assert "151 more" in output
    assert len(json.loads(kvtierd("status", "--address", admin.address, "--json").output)["sessions"]) == 201


def stop_after(rounds: int, monkeypatch: pytest.MonkeyPatch, each: Callable[[int], None]) -> None:
    """End --watch as Ctrl-C would after some rounds, without waiting."""
    done = [0]

    def sleep(_seconds: float) -> None:
        done[0] += 1
        if done[0] > rounds:
            raise KeyboardInterrupt
        each(done[0])

    monkeypatch.setattr(time, "sleep", sleep)


def test_watch_json_survives_a_restart(admin: Any, kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.answers["GetStatus"] = answer()

    def each(done: int) -> None:
        admin.error = (grpc.StatusCode.UNAVAILABLE, "", "gone") if done == 2 else None

    stop_after(3, monkeypatch, each)
    result = kvtierd("status", "--address", admin.address, "--watch", "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 3
    assert "gone" in result.stderr


def test_journals_and_plurals_are_said(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStatus"] = answer()
    assert "journals" not in kvtierd("status", "--address", admin.address).output, "an older daemon does not say"
    found = answer()
    found.tiers[1].configured_bytes = 2**32 + 2**27
    found.blocks = 1
    admin.answers["GetStatus"] = found
    output = kvtierd("status", "--address", admin.address).output
    assert "nvme: of the 4.1 GiB configured, 128 MiB are for journals and snapshots" in output
    assert "1 block\n" in output


def test_watch_into_a_pipe_is_one_snapshot_after_the_other(admin: Any, kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.answers["GetStatus"] = answer()

    def each(done: int) -> None:
        admin.error = (grpc.StatusCode.UNAVAILABLE, "", "gone") if done == 2 else None

    stop_after(3, monkeypatch, each)
    result = kvtierd("status", "--address", admin.address, "--watch")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("kvtierd 1.2.3 at ") == 3
    assert "gone; waiting for it" in result.stderr
    assert "\x1b" not in result.stdout


def test_watch_on_a_terminal(admin: Any, kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    real = status_module.console

    def terminal() -> Console:
        found = real()
        found._force_terminal = True
        return found

    monkeypatch.setattr(status_module, "console", terminal)
    admin.answers["GetStatus"] = answer()

    def each(done: int) -> None:
        admin.error = (grpc.StatusCode.UNAVAILABLE, "", "gone") if done == 1 else None

    stop_after(2, monkeypatch, each)
    result = kvtierd("status", "--address", admin.address, "--watch")
    assert result.exit_code == 0, result.output
    assert len(admin.requests) == 3
    assert "kvtierd 1.2.3" in result.output


def test_watch_fails_when_nobody_answers_at_first(kvtierd: Kvtierd) -> None:
    assert kvtierd("status", "--watch").exit_code == 3
