"""Goal: at debug, the log has one line for each decision, as text and as JSON, with what was decided and why; no secrets are in it,
and at other levels none of it.

Method: a real daemon that has to grant, refuse, move and forget; its log is read back and compared with what its client was told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from kvtierd.cli import cli
from kvtierd.client import Client
from kvtierd.errors import DaemonUnavailableError, RequestError
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc

KIB64 = 64 << 10
KEYS = [bytes([n]) * 32 for n in range(1, 25)]


def busy_day(daemon: DaemonProcess, make_client: Callable[..., Client]) -> bytes:
    """Decisions of all kinds. Returns the token of a session that has ended."""
    client = make_client(daemon, KIB64, model="a model\nwith lines", tenant="acme")
    for key in KEYS:
        assert client.save([key], [bytes(KIB64)], timeout_s=20.0, wait_s=15.0).complete
    assert client.save(KEYS[-2:], [bytes(KIB64)] * 2).held == 2
    assert client.load(KEYS[:4], [bytearray(KIB64) for _ in range(4)], timeout_s=20.0).loaded == 4
    assert not client.load([bytes(32)], [bytearray(KIB64)]).loaded
    assert client.evict(KEYS[10:12]) >= 2
    with pytest.raises(RequestError):
        client.pin(KEYS[:1], -1.0)
    assert client.pin(KEYS[:1], 60.0).pinned == 1
    token = client.session_token
    client.close()
    time.sleep(0.2)
    assert daemon.stop() == 0
    return token


CONFIG = {"cpu": {"capacity": "1MiB", "extent": "256KiB", "ttl": "0.5s"}, "nvme": {"capacity": "8MiB", "segment": "4MiB"}}


def test_json_lines_tell_each_decision(make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]) -> None:
    daemon = make_daemon(**CONFIG, log={"level": "debug", "json_lines": True})
    token = busy_day(daemon, make_client)
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    assert all({"ts", "level", "logger", "msg"} <= set(line) for line in lines)
    told: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "decision" in line:
            told.setdefault(line["decision"], []).append(line)
    saves = told["save"]
    assert sum(line.get("granted", 0) for line in saves) == len(KEYS)
    assert saves[-1]["held"] == 2
    of_tenants = [told[name] for name in ("save", "commit", "demote", "moved", "evict", "pin")]
    assert {line["tenant"] for of_tenant in of_tenants for line in of_tenant} == {"acme"}
    assert saves[0]["first"] == "010101010101"
    assert sum(line["blocks"] for line in told["commit"]) == len(KEYS)
    *found, missed = told["load"]  # the client asks for a few at a time, as CPU memory is small
    assert sum(line["keys"] for line in found) == sum(line.get("nvme", 0) + line.get("cpu", 0) for line in found) == 4
    assert missed["missing"] == missed["keys"] == 1
    assert {line["why"] for line in told["demote"]} & {"pressure", "watermark", "ttl"}
    assert sum(line.get("ok", 0) for line in told["moved"]) >= len(KEYS) - 16
    evicted = {(line["tier"], line["reason"]) for line in told["evict"]}
    assert ("cpu", "pressure") in evicted
    assert evicted >= {("nvme", "request")} or evicted >= {("cpu", "request")}
    assert told["realm opened"][0]["model"] == "a model\nwith lines"
    assert told["extent made"]
    assert told["pin"][0]["copies"] == 1
    (refused,) = told["refuse"]
    assert (refused["call"], refused["reason"]) == ("Pin", "bad_request")
    assert (refused["session"], refused["tenant"]) == (saves[0]["session"], "acme")
    assert token.hex() not in daemon.log()
    assert not any(key.hex() in daemon.log() for key in KEYS)


def test_lines_of_several_tenants_name_each(make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]) -> None:
    """Goal: what goes of a tenant and what is made for it is told with its name, and the limits that it is given are told in words.

    Method: one fills CPU memory, another takes an extent of it.
    """
    daemon = make_daemon(**CONFIG, log={"level": "debug", "json_lines": True})
    for options in (["--cpu-quota", "512KiB", "--ttl-cpu", "10min"], ["--class", "premium", "--cpu-reserve", "25%"]):
        set_ = CliRunner().invoke(cli, ["tenants", "set", "--address", daemon.address, "b", *options])
        assert set_.exit_code == 0, set_.output
    first, second = (make_client(daemon, KIB64, model=name, tenant=name) for name in ("acme", "b"))
    assert first.save(KEYS[:16], [bytes(KIB64)] * 16, timeout_s=20.0, wait_s=15.0).complete
    assert second.save(KEYS[:4], [bytes(KIB64)] * 4, timeout_s=20.0, wait_s=15.0).complete
    assert CliRunner().invoke(cli, ["tenants", "rm", "--address", daemon.address, "b", "--force"]).exit_code == 0
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    told = [(line["decision"], line.get("tier"), line.get("tenant"), line.get("realm")) for line in lines if "decision" in line]
    assert {line for line in told if line[0] == "extent made"} == {
        ("extent made", "cpu", "acme", 1), ("extent made", "cpu", "b", 2), ("extent made", "nvme", None, None),
    }  # fmt: skip
    assert ("extent retired", "cpu", "acme", 1) in told and ("evict", "cpu", "acme", None) in told
    assert [line["msg"].removeprefix("limits of tenant 'b' are now ") for line in lines if "are now" in line["msg"]] == [
        "cpu_quota 524288, cpu_ttl 600", "class premium, cpu_quota 524288, cpu_reserve 25%, cpu_ttl 600", "none",
    ]  # fmt: skip


def test_what_is_refused_is_told_with_its_tenant(
    make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]
) -> None:
    """Whichever way it comes: as a call of its own or down a stream, of a session's tenant or of another, or without a session."""
    daemon = make_daemon(**CONFIG, log={"level": "debug", "json_lines": True})
    client = make_client(daemon, KIB64, tenant="acme")
    assert client.wait_attached(20.0)
    token = client.session_token
    with pytest.raises(RequestError):
        client.pin(KEYS[:1], -1.0)
    with pytest.raises(RequestError):
        client.pin(KEYS[:1], -1.0, tenant="other firm")
    with pytest.raises(DaemonUnavailableError):
        make_client(daemon, KIB64, tenant="no name", timeout_s=1.0)
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        for call in (
            lambda: stub.Lookup(pb.LookupRequest(session=token, keys=b"short")),
            lambda: stub.Lookup(pb.LookupRequest(session=token, keys=b"short", tenant="third")),
            lambda: stub.Lookup(pb.LookupRequest(session=b"nobody's", keys=bytes(32), tenant="fourth")),
            lambda: stub.SaveBytes(iter([pb.SaveBytesRequest(session=token, tenant="fifth", key=b"short")])),
            lambda: list(stub.Load(pb.LoadRequest(session=token, keys=b"short", tenant="sixth"))),
        ):
            with pytest.raises(grpc.RpcError):
                call()
    client.close()
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log().splitlines()]
    told = [(line["call"], line.get("session"), line.get("tenant")) for line in lines if line.get("decision") == "refuse"]
    mine = told[0][1]
    assert mine
    assert told[:2] == [("Pin", mine, "acme"), ("Pin", mine, "other firm")]
    assert ("Attach", None, "no name") in told
    assert [line for line in told[2:] if line[0] != "Attach"] == [
        ("Lookup", mine, "acme"), ("Lookup", mine, "third"), ("Lookup", None, "fourth"), ("SaveBytes", mine, "fifth"),
        ("Load", mine, "sixth"),
    ]  # fmt: skip


def test_text_has_one_line_a_decision(make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]) -> None:
    daemon = make_daemon(**CONFIG, log={"level": "debug"})
    busy_day(daemon, make_client)
    lines = daemon.log().splitlines()
    (opened,) = [line for line in lines if " realm opened " in line]
    assert r"tenant=acme model='a model\nwith lines'" in opened
    assert any(" DEBUG   save session=1 tenant=acme ticket=" in line and line.endswith("granted=1") for line in lines)
    assert any("evict tenant=acme tier=cpu reason=pressure copies=" in line for line in lines)


def test_other_levels_have_none_of_it(make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]) -> None:
    daemon = make_daemon(**CONFIG)
    busy_day(daemon, make_client)
    assert "DEBUG" not in daemon.log()
    assert " evict " not in daemon.log()
