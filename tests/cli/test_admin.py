"""Goal: admin commands send what was asked for and show what was answered; failures have a clear line and the right code.

Method: run each command against a fake admin service on a real unix socket, look at the request it got and at the output.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result

from kvtierd.v1 import admin_pb2, kvtier_pb2

KEY = bytes(range(32))
Kvtierd = Callable[..., Result]


def block(n: int = 0) -> admin_pb2.BlockInfo:
    return admin_pb2.BlockInfo(
        key=n.to_bytes(32, "big"),
        tenant="acme",
        fingerprint=b"\xab" * 32,
        bytes=2 << 20,
        states=["", "ready", "filling"],
        pins=2,
        idle_s=90,
    )


def test_evict_sends_every_condition(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["EvictBlocks"] = admin_pb2.EvictBlocksResponse(evicted=1234)
    result = kvtierd(
        "--address", admin.address, "evict", "--tenant", "acme", "--namespace", "ab" * 4, "--key", KEY.hex(), "--tier", "NVME",
        "--idle", "10min",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output == "1,234 copies forgotten\n"
    (request,) = admin.requests
    assert request == admin_pb2.EvictBlocksRequest(
        tenant="acme", fingerprint=b"\xab" * 4, keys=KEY, tier=kvtier_pb2.TIER_NVME, idle_s=600.0
    )


def test_evict_without_a_condition_asks_for_all(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["EvictBlocks"] = admin_pb2.EvictBlocksResponse(evicted=3)
    result = kvtierd("evict", "--address", admin.address)
    assert result.exit_code == 2
    assert "--all" in result.output
    assert admin.requests == []
    result = kvtierd("evict", "--address", admin.address, "--all", "--json")
    assert json.loads(result.output) == {"evicted_copies": 3, "evicted_pinned": 0, "evicted_in_use": 0}
    assert admin.requests == [admin_pb2.EvictBlocksRequest(all=True)]


def test_evict_says_whose_memory_stays(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["EvictBlocks"] = admin_pb2.EvictBlocksResponse(evicted=1, evicted_pinned=1)
    output = kvtierd("evict", "--address", admin.address, "--all").output
    assert output.startswith("1 copy forgotten\n1 of these is pinned: the memory stays taken until the pin ends; 'kvtierd pins'")
    admin.answers["EvictBlocks"] = admin_pb2.EvictBlocksResponse(evicted=5, evicted_pinned=2, evicted_in_use=3)
    output = kvtierd("evict", "--address", admin.address, "--all").output
    assert "2 of these are pinned" in output
    assert "3 of these are in use" in output


def test_an_empty_key_file_never_evicts_everything(admin: Any, kvtierd: Kvtierd) -> None:
    result = kvtierd("evict", "--address", admin.address, "--keys-from", "-", "--tenant", "acme", stdin="# none\n\n")
    assert result.exit_code == 2
    assert "names no keys" in result.output
    assert admin.requests == []


def test_pin_reads_keys_from_a_file(admin: Any, kvtierd: Kvtierd, tmp_path: Path) -> None:
    admin.answers["PinBlocks"] = admin_pb2.PinBlocksResponse(ticket=77, pinned=2)
    keys = [bytes([n]) * 32 for n in (1, 2)]
    (tmp_path / "keys").write_text("# two keys\n" + "\n".join(k.hex() for k in keys) + "\n")
    result = kvtierd("pin", "--address", admin.address, "--keys-from", tmp_path / "keys", "--for", "2h", "--tenant", "acme")
    assert result.exit_code == 0, result.output
    assert "2 blocks pinned for 2 h 0 min; ticket 77" in result.output
    assert admin.requests == [admin_pb2.PinBlocksRequest(keys=b"".join(keys), tenant="acme", expires_s=7200)]


def test_pin_of_nothing_fails(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["PinBlocks"] = admin_pb2.PinBlocksResponse()
    assert kvtierd("pin", "--address", admin.address, "--key", KEY.hex()).exit_code == 1
    assert kvtierd("pin", "--address", admin.address).exit_code == 2
    assert len(admin.requests) == 1


def test_a_bad_line_of_a_key_file_is_named(admin: Any, kvtierd: Kvtierd) -> None:
    result = kvtierd("pin", "--address", admin.address, "--keys-from", "-", stdin=f"{KEY.hex()}\nnot hex\n")
    assert result.exit_code == 2
    assert "line 2" in result.output


def pin(n: int) -> admin_pb2.PinInfo:
    return admin_pb2.PinInfo(
        ticket=9, key=n.to_bytes(32, "big"), tenant="acme", fingerprint=b"\xab" * 32, tier=kvtier_pb2.TIER_CPU, bytes=2 << 20,
        expires_in_s=3599, evicted=n % 2 == 1,
    )  # fmt: skip


def test_pins_reads_all_pages(admin: Any, kvtierd: Kvtierd) -> None:
    def answer(request: admin_pb2.ListPinsRequest) -> admin_pb2.ListPinsResponse:
        start = int(request.page_token or 0)
        end = min(start + request.page_size, 1500)
        found = [pin(n) for n in range(start, end)]
        return admin_pb2.ListPinsResponse(pins=found, next_page_token=str(end) if end < 1500 else "")

    admin.answers["ListPins"] = answer
    lines = kvtierd("pins", "--address", admin.address, "--limit", 0, "--tenant", "acme", "--json").stdout.splitlines()
    assert [json.loads(line)["key"] for line in lines] == [n.to_bytes(32, "big").hex() for n in range(1500)]
    first = json.loads(lines[0])
    assert set(first) == {f.name for f in admin_pb2.PinInfo.DESCRIPTOR.fields} - {"bytes", "fingerprint"} | {
        "size_bytes",
        "namespace",
    }
    assert all(r.tenant == "acme" for r in admin.requests)
    output = kvtierd("pins", "--address", admin.address, "--limit", 2).output
    for part in ("ends in", "59 min 59 s", "cpu (evicted)", (1).to_bytes(32, "big").hex(), "2 pinned blocks, as --limit says"):
        assert part in output, part
    admin.answers["ListPins"] = admin_pb2.ListPinsResponse()
    assert kvtierd("pins", "--address", admin.address).output == "no pinned blocks\n"


@pytest.mark.parametrize("command", ["blocks", "pins", "story"])
def test_tables_fit_into_80_columns_and_are_whole_in_pipes(admin: Any, kvtierd: Kvtierd, command: str) -> None:
    shown = [block(n) for n in range(3)]
    for one in shown:
        one.tenant = "a-tenant-with-quite-a-long-name-" * 3
    event = admin_pb2.StoryEvent(at_s=1.5, key=KEY, tier=kvtier_pb2.TIER_CPU, to="ready", why="a long reason " * 8)
    admin.answers["ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=shown)
    admin.answers["ListPins"] = admin_pb2.ListPinsResponse(pins=[pin(n) for n in range(3)])
    admin.answers["GetStory"] = admin_pb2.GetStoryResponse(events=[event], block=shown[1])
    args = [command, "--address", admin.address, *([KEY.hex()] if command == "story" else [])]
    lines = on_terminal(args, 80)
    assert max(map(len, lines)) <= 80
    rows = {"blocks": 5, "pins": 5, "story": 5}[command]
    assert len(lines) == rows, "no row is wrapped:\n" + "\n".join(lines)
    assert any("…" in line for line in lines)
    piped = kvtierd(*args).output
    assert "…" not in piped
    assert (1).to_bytes(32, "big").hex() in piped
    assert len(piped.splitlines()) == (5 if command == "story" else 4)


def on_terminal(args: list[str], columns: int) -> list[str]:
    """Lines that a command writes on a terminal so wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "dumb"}
    done = subprocess.Popen([sys.executable, "-m", "kvtierd", *args], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # what a closed terminal answers
        while part := os.read(master, 65536):
            output += part
    os.close(master)
    assert done.wait(30) == 0, output
    return [line.rstrip() for line in output.decode().splitlines()]


def test_a_shortened_key_is_taken_where_its_start_is_enough(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStory"] = admin_pb2.GetStoryResponse(block=block())
    assert kvtierd("story", "--address", admin.address, KEY.hex()[:16] + "…").exit_code == 0
    assert admin.requests[0].key == KEY[:8]
    result = kvtierd("pin", "--address", admin.address, "--key", KEY.hex()[:16] + "…")
    assert result.exit_code == 2
    assert "--json" in result.output


def test_one_is_one(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["PinBlocks"] = admin_pb2.PinBlocksResponse(ticket=7, pinned=1)
    assert kvtierd("pin", "--address", admin.address, "--key", KEY.hex()).output.startswith("1 block pinned")
    admin.answers["Checkpoint"] = admin_pb2.CheckpointResponse(copies=1)
    assert "1 copy written" in kvtierd("checkpoint", "--address", admin.address).output
    admin.answers["ListBlocks"] = paged(5)
    assert "1 block, as --limit says" in kvtierd("blocks", "--address", admin.address, "--limit", 1).output


def test_unpin(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["UnpinBlocks"] = admin_pb2.UnpinBlocksResponse()
    assert kvtierd("unpin", "--address", admin.address, 2**64 - 1).output == "unpinned\n"
    assert admin.requests == [admin_pb2.UnpinBlocksRequest(ticket=2**64 - 1)]


def paged(total: int) -> Callable[[admin_pb2.ListBlocksRequest], admin_pb2.ListBlocksResponse]:
    def answer(request: admin_pb2.ListBlocksRequest) -> admin_pb2.ListBlocksResponse:
        start = int(request.page_token or 0)
        end = min(start + request.page_size, total)
        return admin_pb2.ListBlocksResponse(
            blocks=[block(n) for n in range(start, end)], next_page_token=str(end) if end < total else ""
        )

    return answer


@pytest.mark.parametrize("total, limit, expected", [(2500, 0, 2500), (2500, 1500, 1500), (5, 100, 5), (0, 100, 0)])
def test_blocks_reads_all_pages_up_to_the_limit(admin: Any, kvtierd: Kvtierd, total: int, limit: int, expected: int) -> None:
    admin.answers["ListBlocks"] = paged(total)
    result = kvtierd("blocks", "--address", admin.address, "--limit", limit, "--json", "--tier", "cpu", "--tenant", "acme")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["key"] for line in lines] == [n.to_bytes(32, "big").hex() for n in range(expected)]
    assert all(r.tier == kvtier_pb2.TIER_CPU and r.tenant == "acme" and 1 <= r.page_size <= 1000 for r in admin.requests)
    assert all(line["states"] == {"hbm": "", "cpu": "ready", "nvme": "filling"} for line in lines)


def test_blocks_ends_when_a_page_repeats_its_token(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block(1)], next_page_token="same")
    result = kvtierd("blocks", "--address", admin.address, "--limit", 0, "--json")
    assert result.exit_code == 0
    assert len(admin.requests) == 2


def test_blocks_table_shows_whole_keys(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[block(7)])
    output = kvtierd("blocks", "--address", admin.address).output
    assert (7).to_bytes(32, "big").hex() in output
    assert "cpu nvme(filling)" in output


def test_blocks_say_when_they_expire(admin: Any, kvtierd: Kvtierd) -> None:
    mortal = block(1)
    mortal.expires_in_s = 120.0
    admin.answers["ListBlocks"] = admin_pb2.ListBlocksResponse(blocks=[mortal, block(2)])
    _, first, second = kvtierd("blocks", "--address", admin.address).output.splitlines()
    assert first.endswith("2 min 0 s") and second.endswith("never")
    lines = kvtierd("blocks", "--address", admin.address, "--json").output.splitlines()
    assert [json.loads(line)["expires_in_s"] for line in lines] == [120.0, None]
    admin.answers["GetStory"] = admin_pb2.GetStoryResponse(block=mortal)
    assert "2 min 0 s" in kvtierd("story", "--address", admin.address, KEY.hex()).output


def test_story(admin: Any, kvtierd: Kvtierd) -> None:
    event = admin_pb2.StoryEvent(at_s=1.5, key=KEY, tier=kvtier_pb2.TIER_CPU, to="READY", why="commit", **{"from": "FILLING"})
    admin.answers["GetStory"] = admin_pb2.GetStoryResponse(events=[event], block=block())
    result = kvtierd("story", "--address", admin.address, KEY[:4].hex(), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    expected = {"at_s": 1.5, "key": KEY.hex(), "tier": "cpu", "from": "FILLING", "to": "READY", "why": "commit"}
    assert data["events"] == [expected]
    assert data["block"]["size_bytes"] == 2 << 20
    assert admin.requests[0].key == KEY[:4]
    text = kvtierd("story", "--address", admin.address, KEY[:4].hex()).output
    assert "FILLING" in text
    assert "commit" in text


def test_story_of_an_unknown_block_fails(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetStory"] = admin_pb2.GetStoryResponse()
    result = kvtierd("story", "--address", admin.address, KEY.hex())
    assert result.exit_code == 1
    assert "no such block" in result.output


@pytest.mark.parametrize("bad", ["ab", "abcdef", "zz" * 8, "ab" * 33, "abc"])
def test_bad_hex_is_a_usage_error(admin: Any, kvtierd: Kvtierd, bad: str) -> None:
    assert kvtierd("story", "--address", admin.address, bad).exit_code == 2
    assert admin.requests == []


def test_drain_fails_while_bytes_are_left(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["Drain"] = admin_pb2.DrainResponse(dirty_bytes=3 << 20)
    result = kvtierd("drain", "--address", admin.address, "--timeout", "5s", "--resume")
    assert result.exit_code == 1
    assert "3.0 MiB are still only in memory" in result.output
    assert admin.requests == [admin_pb2.DrainRequest(timeout_s=5, resume=True)]
    admin.answers["Drain"] = admin_pb2.DrainResponse()
    assert kvtierd("drain", "--address", admin.address).exit_code == 0


def test_checkpoint(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["Checkpoint"] = admin_pb2.CheckpointResponse(copies=42)
    assert "42 copies" in kvtierd("checkpoint", "--address", admin.address).output


def test_running_config(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetConfig"] = admin_pb2.GetConfigResponse(toml="[cpu]\ncapacity = 1\n")
    assert kvtierd("config", "--running", "--address", admin.address).output == "[cpu]\ncapacity = 1\n"


# ---- failures


def test_a_refusal_shows_its_reason(admin: Any, kvtierd: Kvtierd) -> None:
    admin.error = (grpc.StatusCode.NOT_FOUND, "UNKNOWN_TICKET", "ticket 5 is not known")
    result = kvtierd("unpin", "--address", admin.address, 5)
    assert result.exit_code == 1
    assert result.output == "Error: ticket 5 is not known (UNKNOWN_TICKET)\n"


@pytest.mark.parametrize(
    "code, exit_code",
    [(grpc.StatusCode.UNAVAILABLE, 3), (grpc.StatusCode.INTERNAL, 1), (grpc.StatusCode.UNIMPLEMENTED, 1)],
)
def test_plain_statuses(admin: Any, kvtierd: Kvtierd, code: grpc.StatusCode, exit_code: int) -> None:
    admin.error = (code, "", "because")
    result = kvtierd("checkpoint", "--address", admin.address)
    assert result.exit_code == exit_code
    assert result.output.startswith("Error: ")
    assert "Traceback" not in result.output


def test_no_socket_is_unreachable(kvtierd: Kvtierd, short_dir: Path) -> None:
    result = kvtierd("status", "--address", short_dir / "none.sock")
    assert result.exit_code == 3
    assert "kvtierd serve" in result.output
    assert result.output.count("\n") == 1


def test_a_socket_left_over_is_unreachable(kvtierd: Kvtierd, short_dir: Path) -> None:
    path = short_dir / "old.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    result = kvtierd("status", "--address", f"unix:{path}")
    assert result.exit_code == 3
    assert "nobody listens" in result.output


def test_a_file_is_no_socket(kvtierd: Kvtierd, short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    result = kvtierd("status", "--address", short_dir / "file")
    assert result.exit_code == 3
    assert "not a socket" in result.output


def test_a_closed_port_is_unreachable(kvtierd: Kvtierd) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets the port, and nobody answers
        result = kvtierd("status", "--address", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.exit_code == 3
    assert result.output.startswith("Error: no daemon answers")


@contextlib.contextmanager
def somebody(listener: socket.socket, answer: bytes) -> Iterator[None]:
    """Somebody who says one thing to whoever connects, and hangs up."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("command", [("status",), ("bench", "--only", "lookup"), ("drain",)])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_answers_but_is_no_daemon_is_said(kvtierd: Kvtierd, short_dir: Path, command: tuple[str, ...], answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, somebody(server, answer):
        result = kvtierd(*command, "--address", f"127.0.0.1:{server.getsockname()[1]}")
    assert result.exit_code == 3
    assert "what listens there is no daemon" in result.output and "server.listen" in result.output
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(short_dir / "other.sock"))
        other.listen()
        with somebody(other, answer):
            result = kvtierd(*command, "--address", short_dir / "other.sock")
    assert result.exit_code == 3
    assert "what listens there is no daemon" in result.output and "--address" in result.output
    assert not any(word in result.output for word in ("HTTP/2", "recvmsg", "last error", "FAILED_PRECONDITION"))


@pytest.mark.parametrize("command", [("status",), ("bench", "--only", "lookup")])
def test_nobody_at_all_is_said(kvtierd: Kvtierd, short_dir: Path, command: tuple[str, ...]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(short_dir / "other.sock"))
        other.listen()
        said = kvtierd(*command, "--address", short_dir / "other.sock")
    assert (said.exit_code, "another kind" in said.output) == (3, True)
    said = kvtierd(*command, "--address", short_dir / "none.sock")
    assert (said.exit_code, "start one with 'kvtierd serve'" in said.output) == (3, True)
    said = kvtierd(*command, "--address", "host.invalid:1")
    assert (said.exit_code, "is not the name of a host" in said.output) == (3, True)


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:99999", ":1"])
def test_a_bad_address_is_a_usage_error(kvtierd: Kvtierd, address: str) -> None:
    assert kvtierd("status", "--address", address).exit_code == 2


def test_the_address_comes_from_the_configuration(admin: Any, kvtierd: Kvtierd, tmp_path: Path) -> None:
    admin.answers["Checkpoint"] = admin_pb2.CheckpointResponse(copies=1)
    file = tmp_path / "kvtierd.toml"
    file.write_text(f'[server]\nsocket = "{admin.address}"\n')
    assert kvtierd("--config", file, "checkpoint").exit_code == 0
    assert kvtierd("checkpoint", "--config", file).exit_code == 0
    assert len(admin.requests) == 2


def test_the_address_comes_from_the_variable(admin: Any, kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.answers["Checkpoint"] = admin_pb2.CheckpointResponse(copies=1)
    monkeypatch.setenv("KVTIERD_ADDRESS", admin.address)
    assert kvtierd("checkpoint").exit_code == 0


def test_tls_options_must_fit(kvtierd: Kvtierd, tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("x")
    assert kvtierd("status", "--address", "/x/y.sock", "--tls-ca", pem).exit_code == 2
    assert kvtierd("status", "--address", "localhost:1", "--tls-cert", pem).exit_code == 2
    assert kvtierd("status", "--address", "localhost:1", "--tls-ca", tmp_path / "none.pem").exit_code == 2
    os.mkfifo(tmp_path / "pipe")  # never waited for
    said = kvtierd("status", "--address", "localhost:1", "--tls-ca", tmp_path / "pipe")
    assert said.exit_code == 2 and "it is no plain file" in said.output
