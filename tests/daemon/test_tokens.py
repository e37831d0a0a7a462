"""Goal: where a daemon has tokens, a call needs one, does what its token allows and no more, and ends with it. No token is told.

Method: a real daemon whose token file changes while it runs; the library, bare gRPC calls and the command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tomli_w
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtierd.cli import cli
from kvtierd.client import Client, Prober
from kvtierd.errors import ConfigError, DaemonUnavailableError, Reason, RequestError, StartupError
from kvtierd.runtime import tokens as tokens_module
from kvtierd.runtime.tokens import MAX_FILE_BYTES, Tokens, digest_of, read_grants
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, admin_pb2_grpc, kvtier_pb2_grpc
from kvtierd.v1 import kvtier_pb2 as pb
from tests.daemon.test_hostile import until

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 64 << 10
SECRETS = {name: f"secret-of-{name}-{os.urandom(16).hex()}" for name in ("engine", "team", "operator")}
ENTRIES: dict[str, dict[str, Any]] = {
    "engine": {"token": SECRETS["engine"], "tenants": ["default", "chat-*"]},
    "team": {"sha256": hashlib.sha256(SECRETS["team"].encode()).hexdigest(), "tenants": ["team"]},
    "operator": {"token": SECRETS["operator"], "admin": True},
}


class Guarded:
    """A daemon with tokens, and a file a token for its callers."""

    def __init__(self, make_daemon: MakeDaemon, folder: Path, **server: Any) -> None:
        self.folder = folder
        self.file = folder / "tokens.toml"
        self.write(ENTRIES)
        for name, secret in SECRETS.items():
            (folder / name).write_text(secret + "\n")
        config = {"server": {"token_file": str(self.file), **server}, "log": {"level": "debug"}}
        self.daemon = make_daemon(start=False, **config)
        self.daemon.token = SECRETS["operator"]
        self.daemon.start()

    def write(self, entries: dict[str, dict[str, Any]]) -> None:
        """Change the file as an operator should: all at once."""
        new = self.folder / "tokens.new"
        new.touch(mode=0o600)
        new.write_text(tomli_w.dumps({"tokens": entries}))
        new.rename(self.file)

    def token(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture
def guarded(make_daemon: MakeDaemon, tmp_path: Path) -> Guarded:
    return Guarded(make_daemon, tmp_path)


def refusal(make_client: MakeClient, daemon: DaemonProcess, **options: Any) -> str:
    """Why a client cannot attach."""
    with pytest.raises(DaemonUnavailableError) as caught:
        make_client(daemon, SIZE, timeout_s=3.0, **options)
    return str(caught.value)


def refusals(make_client: MakeClient, daemon: DaemonProcess, *options: dict[str, Any]) -> list[str]:
    """The same of several clients at a time: each goes on trying until its time is over."""
    with ThreadPoolExecutor(len(options)) as pool:
        return list(pool.map(lambda each: refusal(make_client, daemon, **each), options))


def bearer(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {SECRETS[name]}")]


def reason_of(call: Callable[[], object]) -> str:
    """The text of a refusal of a bare call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
    return str(caught.value.details())  # type: ignore[attr-defined]


# ---- who comes in


def test_a_call_needs_a_token_that_the_daemon_knows(guarded: Guarded, make_client: MakeClient, tmp_path: Path) -> None:
    daemon = guarded.daemon
    (tmp_path / "wrong").write_text("x" * 40)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_text(" \n")
    files = [{"token_file": tmp_path / name} for name in ("wrong", "none", "pipe", "empty")]
    without, wrong, none, pipe, empty = refusals(make_client, daemon, {}, *files)
    assert "asks for a token" in without
    assert "does not know this token" in wrong
    assert "cannot read the token file" in none
    assert "it is no plain file" in pipe
    assert "holds no token" in empty
    client = make_client(daemon, SIZE, token_file=guarded.token("engine"))
    key, block = os.urandom(32), os.urandom(SIZE)
    assert client.save([key], [block]).saved == 1
    assert client.load_bytes([key]).blocks[0][0] == block, "also by calls outside of the stream"
    assert client.save_bytes([os.urandom(32)], [block]).saved == 1


def test_the_token_of_a_variable_is_shown(guarded: Guarded, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIERD_TOKEN_FILE", guarded.token("engine"))
    assert make_client(guarded.daemon, SIZE).save([os.urandom(32)], [bytes(SIZE)]).saved == 1
    assert "asks for a token" in refusal(make_client, guarded.daemon, token_file="")


def test_every_method_of_every_service_asks_but_health(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.daemon.address) as channel:
        for module in (pb, admin_pb2):
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    call = channel.stream_stream(path) if method.client_streaming else channel.unary_stream(path)
                    text = reason_of(lambda call=call, m=method: list(call(iter([b""]) if m.client_streaming else b"", timeout=10)))
                    assert "asks for a token" in text, path
        checked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


ODD = ["", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "Bearer {} {}", "Bearer " + "y" * 6000]


@pytest.mark.parametrize("header", ODD)
def test_odd_headers_are_no_tokens(guarded: Guarded, header: str) -> None:
    text = header.format(SECRETS["operator"], SECRETS["operator"])
    with grpc.insecure_channel(guarded.daemon.address) as channel:
        stub = admin_pb2_grpc.KvTierAdminServiceStub(channel)
        told = reason_of(lambda: stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=[("authorization", text)], timeout=10))
        assert "does not know this token" in told


@pytest.mark.parametrize("unix, data, admin", [("none", True, True), ("admin", True, False), ("all", False, False)])
def test_which_calls_on_the_unix_socket_need_one(
    make_daemon: MakeDaemon, make_client: MakeClient, tmp_path: Path, unix: str, data: bool, admin: bool
) -> None:
    daemon = Guarded(make_daemon, tmp_path, unix_tokens=unix).daemon
    daemon.token = ""
    if admin:
        assert daemon.status().version
    else:
        assert "asks for a token" in reason_of(daemon.status)
    if data:
        assert make_client(daemon, SIZE, tenant="anybody").save([os.urandom(32)], [bytes(SIZE)]).saved == 1
    else:
        assert "asks for a token" in refusal(make_client, daemon)


def test_the_admin_api_is_for_tokens_that_say_so(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.daemon.address) as channel:
        stub = admin_pb2_grpc.KvTierAdminServiceStub(channel)
        for method in admin_pb2.DESCRIPTOR.services_by_name["KvTierAdminService"].methods:
            request = getattr(admin_pb2, method.input_type.name)()
            text = reason_of(lambda n=method.name, r=request: getattr(stub, n)(r, metadata=bearer("engine"), timeout=10))
            assert "'engine' is not for the admin API" in text
        assert stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=bearer("operator"), timeout=10).version


def test_the_command_line_shows_a_token(guarded: Guarded) -> None:
    def run(*args: str, **env: str) -> tuple[int, str]:
        result = CliRunner(env={"KVTIERD_TOKEN_FILE": None, **env}).invoke(cli, [*args])
        return result.exit_code, result.output

    where = ("--address", guarded.daemon.address)
    code, text = run("status", *where)
    assert (code, "asks for a token" in text, "PERMISSION" in text) == (1, True, True)
    assert run("status", *where, "--token-file", guarded.token("operator"))[0] == 0
    assert run("--token-file", guarded.token("operator"), "status", *where)[0] == 0
    assert run("status", *where, KVTIERD_TOKEN_FILE=guarded.token("operator"))[0] == 0
    assert run("status", *where, "--token-file", guarded.token("none"))[0] == 2


# ---- what a token allows


def test_a_token_speaks_for_its_tenants_only(guarded: Guarded, make_client: MakeClient) -> None:
    daemon = guarded.daemon
    engine, operator = refusals(
        make_client, daemon, {"token_file": guarded.token("engine"), "tenant": "team"}, {"token_file": guarded.token("operator")}
    )
    assert "does not speak for tenant 'team'" in engine
    assert "does not speak for tenant 'default'" in operator
    team = make_client(daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    key = os.urandom(32)
    assert team.save([key], [bytes(SIZE)]).saved == 1
    engine = make_client(daemon, SIZE, token_file=guarded.token("engine"))
    assert engine.lookup([key], tenant="chat-1").held == 0, "it may"
    foreign: list[Callable[[], object]] = [
        lambda: engine.lookup([key], tenant="team"),
        lambda: engine.reserve([key], tenant="team"),
        lambda: engine.prefetch([key], 1.0, tenant="team"),
        lambda: engine.evict([key], tenant="team"),
        lambda: engine.pin([key], 1.0, tenant="team"),
    ]
    for call in foreign:
        with pytest.raises(RequestError, match="does not speak for tenant 'team'") as caught:
            call()
        assert caught.value.reason is Reason.PERMISSION
    with engine.fetch([key], tenant="team") as fetch:
        assert fetch.poll(10) == []
        assert fetch.reason is Reason.PERMISSION
    assert team.lookup([key]).held == 1


def test_a_probe_tells_nothing_of_a_tenant_that_its_token_does_not_speak_for(guarded: Guarded, make_client: MakeClient) -> None:
    key = os.urandom(32)
    team = make_client(guarded.daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    assert team.save([key], [bytes(SIZE)]).saved == 1
    for name, tenant, held in (("team", "team", True), ("engine", "default", False)):
        client = make_client(guarded.daemon, SIZE, token_file=guarded.token(name), tenant=tenant)
        prober = Prober(client.descriptor_socket, client.session_token)
        number = prober.ask(key, 1, tenant="team")
        assert number is not None
        answers: list[bool | None] = [None]
        assert until(lambda p=prober, n=number, a=answers: a.append(p.answer(n)) or a[-1] is not None)
        assert answers[-1] is held
        prober.close()


def test_a_session_is_its_tokens_own(guarded: Guarded, make_client: MakeClient) -> None:
    team = make_client(guarded.daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    key = os.urandom(32)
    assert team.save([key], [bytes(SIZE)]).saved == 1
    with grpc.insecure_channel(guarded.daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        request = pb.LookupRequest(session=team.session_token, keys=key)
        assert stub.Lookup(request, metadata=bearer("team"), timeout=10).held == 1
        assert "belongs to another token" in reason_of(lambda: stub.Lookup(request, metadata=bearer("engine"), timeout=10))


# ---- a file that changes


def test_sessions_end_with_their_token_and_come_back_with_it(guarded: Guarded, make_client: MakeClient) -> None:
    daemon = guarded.daemon
    engine = make_client(daemon, SIZE, token_file=guarded.token("engine"))
    team = make_client(daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    key = os.urandom(32)
    assert engine.save([key], [bytes(SIZE)]).saved == 1
    pinned = team.pin([key], 60.0)
    assert pinned.pinned == 0
    guarded.write({name: entry for name, entry in ENTRIES.items() if name != "engine"})
    assert until(lambda: [s.tenant for s in daemon.status().sessions] == ["team"]), "it ended, with its processes' sockets"
    with pytest.raises((RequestError, DaemonUnavailableError)):
        engine.lookup([key])
    assert until(lambda: "token" in engine.status.error), engine.status.error
    assert team.lookup([key]).held == 0, "others go on"
    guarded.write(ENTRIES)
    assert engine.wait_attached(30)
    assert engine.lookup([key]).held == 1
    daemon_log = daemon.log()
    assert "Traceback" not in daemon_log


def test_calls_in_progress_end_with_their_token_too(guarded: Guarded, make_client: MakeClient) -> None:
    holder = make_client(guarded.daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    token, used = holder.session_token, lambda: guarded.daemon.status().tiers[0].used_bytes
    parts: queue.SimpleQueue[pb.SaveBytesRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(guarded.daemon.address) as channel, holder.reserve([os.urandom(32)]) as reservation:
        assert reservation.granted
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        parts.put(pb.SaveBytesRequest(session=token, key=os.urandom(32), data=bytes(16)))
        call = stub.SaveBytes.future(iter(parts.get, None), metadata=bearer("team"))
        assert until(lambda: used() == 2 * SIZE)
        guarded.write({**ENTRIES, "team": {**ENTRIES["team"], "tenants": ["another"]}})
        assert until(call.done)
        assert until(lambda: not holder.status.attached)
        assert used() > 0, "its slots stay while its process may be copying into them"
        lookup = pb.LookupRequest(session=token, keys=bytes(32))
        with pytest.raises(grpc.RpcError, match="no such session"):
            stub.Lookup(lookup, metadata=bearer("team"), timeout=10)
    parts.put(None)
    assert until(lambda: used() == 0)


def test_more_tenants_for_a_token_end_no_session(guarded: Guarded, make_client: MakeClient) -> None:
    team = make_client(guarded.daemon, SIZE, token_file=guarded.token("team"), tenant="team")
    session = team.session_token
    guarded.write({**ENTRIES, "team": {**ENTRIES["team"], "tenants": ["team", "second"]}})

    def allowed() -> bool:
        with contextlib.suppress(RequestError):
            return team.lookup([bytes(32)], tenant="second").reason is None
        return False

    assert until(allowed)
    assert team.session_token == session
    assert team.load_bytes([bytes(32)]).reason is Reason.NOT_FOUND, "calls outside of the stream go on too"


def test_a_file_that_breaks_changes_nothing(guarded: Guarded, make_client: MakeClient) -> None:
    # The second is what somebody who writes into it leaves for a moment.
    for count, content in enumerate(("[tokens.engine\n", "", '[tokens.engine]\ntoken = "short"\n', None), 1):
        if content is not None:
            guarded.file.write_text(content)
        else:
            guarded.file.unlink()
        assert until(lambda n=count: guarded.daemon.log().count("stay in force") >= n)
        make_client(guarded.daemon, SIZE, token_file=guarded.token("engine")).close()


# ---- nobody is told a token


def test_no_token_is_in_logs_errors_metrics_or_configuration(
    make_daemon: MakeDaemon, make_client: MakeClient, tmp_path: Path
) -> None:
    guarded = Guarded(make_daemon, tmp_path)
    daemon = guarded.daemon
    theirs = [{"token_file": guarded.token(name), "tenant": "nobody's"} for name in ("engine", "team")]
    told = refusals(make_client, daemon, *theirs)
    make_client(daemon, SIZE, token_file=guarded.token("engine")).save([os.urandom(32)], [bytes(SIZE)])
    guarded.file.write_text(f'[tokens.engine]\ntoken = "{SECRETS["engine"]}"\nspelled = "{SECRETS["team"]}"\n')
    assert until(lambda: "stay in force" in daemon.log())
    guarded.file.write_text(f"[tokens.engine]\ntoken = {SECRETS['engine']}\n")
    assert until(lambda: daemon.log().count("stay in force") == 2)
    with daemon.admin() as stub:
        told.append(stub.GetMetrics(admin_pb2.GetMetricsRequest()).text)
        told.append(stub.GetConfig(admin_pb2.GetConfigRequest()).toml)
    assert float(re.findall(r'kvtierd_rejections_total{reason="permission"} (.*)', told[-2])[0]) >= 2
    told.append(daemon.log())
    told.append(repr(read_grants_of(tmp_path)))
    digests = [digest_of(secret).hex() for secret in SECRETS.values()]
    for text in told:
        assert not [secret for secret in (*SECRETS.values(), *digests) if secret in text]


def read_grants_of(folder: Path) -> object:
    path = folder / "again.toml"
    path.write_text(tomli_w.dumps({"tokens": ENTRIES}))
    return read_grants(path)


# ---- the file


@pytest.mark.parametrize(
    "text, says",
    [
        ("[tokens.a]\n", "tokens.a needs one of sha256 and token"),
        ('[tokens.a]\ntoken = "0123456789abcdef"\nsha256 = "' + "0" * 64 + '"\n', "tokens.a needs one of sha256 and token"),
        ('[tokens.a]\ntoken = "short"\n', "openssl rand"),
        ('[tokens.a]\nsha256 = "abc"\n', r"tokens\.a\.sha256: write the 64 hex digits"),
        ('[tokens.a]\nsha256 = "' + "0" * 64 + '"\ntenant = "x"\n', r"tokens\.a\.tenant: unknown key"),
        ('[tokens.a]\nsha256 = "' + "0" * 64 + '"\ntenants = "x"\n', r"tokens\.a\.tenants"),
        ('[tokens.a]\nsha256 = "' + "0" * 64 + '"\n[tokens.b]\nsha256 = "' + "0" * 64 + '"\n', "are the same token"),
        ("tokens = 3\n", "tokens: Input"),
        ("nonsense", "not valid TOML"),
        ("tokens = " + "[" * 100_000, "not valid TOML"),
        ("#" * (MAX_FILE_BYTES + 1), "bytes"),
        ("\udcff", "no UTF-8"),
        ("", "holds no token"),
        ("[tokens]\n", "holds no token"),
    ],
)
def test_a_file_that_makes_no_sense_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        read_grants(path)


def test_a_file_that_everybody_can_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(tomli_w.dumps({"tokens": ENTRIES}))
    path.chmod(0o602)
    with pytest.raises(ConfigError, match=r"every user of this machine can write to the token file .*chmod it"):
        read_grants(path)


def test_a_pipe_in_the_place_of_the_file_holds_nothing_up(guarded: Guarded, make_client: MakeClient) -> None:
    guarded.file.unlink()
    os.mkfifo(guarded.file)
    assert until(lambda: "it is no plain file; the tokens that were read before stay in force" in guarded.daemon.log())
    guarded.file.unlink()
    guarded.write({name: entry for name, entry in ENTRIES.items() if name != "team"})
    assert until(lambda: f"read {len(ENTRIES) - 1} tokens" in guarded.daemon.log()), "it is looked at as before"
    guarded.file.unlink()
    os.mkfifo(guarded.file)
    assert guarded.daemon.stop() == 0
    with pytest.raises(StartupError, match=r"cannot read the token file .*: it is no plain file"):
        guarded.daemon.start()


def test_a_daemon_does_not_start_without_its_tokens(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read the token file"):
        make_daemon(server={"token_file": str(tmp_path / "none.toml")})


def test_all_tokens_are_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.toml"
    path.write_text(tomli_w.dumps({"tokens": {f"t{i}": {"token": f"{i:032d}"} for i in range(50)}}))
    tokens = Tokens(path)
    compared: list[tuple[bytes, bytes]] = []
    real = tokens_module.hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(tokens_module.hmac, "compare_digest", counting)
    for text, name in ((f"{0:032d}", "t0"), (f"{49:032d}", "t49"), ("none of them", None)):
        compared.clear()
        found = tokens.find(text)
        assert (found.name if found else None) == name
        assert len(compared) == 50


def test_a_plain_token_that_everybody_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.toml"
    path.write_text(tomli_w.dumps({"tokens": {"team": ENTRIES["team"]}}))
    path.chmod(0o644)
    read_grants(path)
    assert not caplog.records
    path.write_text(tomli_w.dumps({"tokens": ENTRIES}))
    read_grants(path)
    assert "every user of this machine can read" in caplog.text
