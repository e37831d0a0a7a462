"""Goal: TCP is encrypted unless somebody says otherwise, client certificates and tokens are asked for where they are set, and what
is left open is told.

Method: certificates made here, a real daemon on a port of loopback, the library and the command line.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvtierd.cli import cli
from kvtierd.client import Client
from kvtierd.config import load_config
from kvtierd.errors import ConfigError, DaemonUnavailableError, StartupError
from kvtierd.service.certificates import Certificates
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import namespace
from tests.daemon.test_sessions import wait_for

MakeDaemon = Callable[..., DaemonProcess]
SIZE = 64 << 10
YEAR = datetime.timedelta(days=365)
TOKEN = "t" * 20


class Authority:
    """A CA in a folder; its certificate is ``ca.pem``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA of {folder.name}")])
        self._write("ca", self._key, self._sign(self._name, self._key, ca=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of a server or client on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._write(name, key, self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, ca=False))

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - YEAR)
            .not_valid_after(now + YEAR)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> tuple[Path, Path]:
        paths = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return paths


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def address() -> str:
    """A free port of loopback."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def works(address: str, credentials: grpc.ChannelCredentials | None, token_file: str = "", tenant: str = "") -> str:
    """Save and load. Returns why that is not possible; empty when it is."""
    key, block = os.urandom(32), os.urandom(SIZE)
    options = {"credentials": credentials, "token_file": token_file, "tenant": tenant, "require": True, "timeout_s": 4.0}
    try:
        with Client(namespace(SIZE), address, **options) as client:  # type: ignore[arg-type]
            assert client.save([key], [block]).saved == 1
            assert client.load_bytes([key]).blocks[0][0] == block
    except DaemonUnavailableError as e:
        return str(e)
    return ""


def reasons(address: str, *callers: tuple[Any, ...]) -> list[str]:
    """The same for several at a time: each goes on trying until its time is over."""
    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(lambda caller: works(address, *caller), callers))


def trusting(authority: Authority, certificate: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    chain, key = (path.read_bytes() for path in certificate) if certificate else (None, None)
    return grpc.ssl_channel_credentials(authority.ca.read_bytes(), key, chain)


def tls(address: str, authority: Authority, **server: str) -> dict[str, str]:
    chain, key = authority.issue("server")
    return {"listen": address, "tls_cert": str(chain), "tls_key": str(key), **server}


def test_callers_that_trust_the_daemon_connect_and_nothing_is_plain(
    make_daemon: MakeDaemon, ours: Authority, tmp_path: Path, address: str
) -> None:
    daemon = make_daemon(server=tls(address, ours))
    right, plain, wrong = reasons(address, (trusting(ours),), (None,), (trusting(Authority(tmp_path / "others")),))
    assert not right
    assert "cannot be reached" in plain, "no call without TLS"
    assert "cannot be reached" in wrong
    assert f"whoever reaches {address} may act for every tenant" in daemon.log()
    result = CliRunner().invoke(cli, ["status", "--address", address, "--tls-ca", str(ours.ca)])
    assert result.exit_code == 0, result.output
    for options, said in (
        ([], "asks for TLS; name its CA with --tls-ca"),
        (["--tls-ca", str(tmp_path / "others" / "ca.pem")], "is not trusted"),
        (["--tls-ca", str(tmp_path / "empty.pem")], "has no certificates"),
    ):
        (tmp_path / "empty.pem").touch()
        result = CliRunner().invoke(cli, ["status", "--address", address, *options])
        assert result.exit_code == 3 and said in result.output, result.output


def test_client_certificates_are_asked_for(make_daemon: MakeDaemon, ours: Authority, tmp_path: Path, address: str) -> None:
    clients, others = Authority(tmp_path / "clients"), Authority(tmp_path / "others")
    daemon = make_daemon(server=tls(address, ours, tls_client_ca=str(clients.ca)))
    mine = clients.issue("engine")
    wrong = (None, others.issue("engine"), ours.issue("engine"))  # the daemon's own CA is not its clients'
    right, *refused = reasons(address, (trusting(ours, mine),), *((trusting(ours, each),) for each in wrong))
    assert not right
    assert all(refused), refused
    assert "whoever reaches" not in daemon.log()
    command = ["status", "--address", address, "--tls-ca", str(ours.ca)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 3 and "--tls-cert and --tls-key" in result.output, result.output
    shown = [*command, "--tls-cert", str(mine[0]), "--tls-key", str(mine[1])]
    assert CliRunner().invoke(cli, shown).exit_code == 0


@pytest.mark.parametrize("unix_tokens", ["none", "admin", "all"])
def test_tokens_are_always_asked_for_on_tcp(
    make_daemon: MakeDaemon, ours: Authority, tmp_path: Path, address: str, unix_tokens: str
) -> None:
    tokens, token = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.touch(mode=0o600)
    tokens.write_text(f'[tokens.engine]\ntoken = "{TOKEN}"\ntenants = ["mine"]\nadmin = true\n')
    token.write_text(TOKEN)
    daemon = make_daemon(
        start=False, server=tls(address, ours, token_file=str(tokens), unix_tokens=unix_tokens, tls_client_ca=str(ours.ca))
    )
    daemon.token = TOKEN
    daemon.start()
    mine = trusting(ours, ours.issue("engine"))
    without, others, own = reasons(address, (mine,), (mine, str(token), "theirs"), (mine, str(token), "mine"))
    assert "asks for a token" in without
    assert "does not speak for tenant 'theirs'" in others
    assert not own


def test_tokens_without_tls_are_warned_of(make_daemon: MakeDaemon, tmp_path: Path, address: str) -> None:
    tokens, token = tmp_path / "tokens.toml", tmp_path / "token"
    tokens.write_text(f'[tokens.engine]\ntoken = "{TOKEN}"\ntenants = ["*"]\nadmin = true\n')
    token.write_text(TOKEN)
    daemon = make_daemon(start=False, server={"listen": address, "insecure": True, "token_file": str(tokens)})
    daemon.token = TOKEN
    daemon.start()
    assert "whoever sees its packets has the tokens" in daemon.log()
    assert "asks for a token" in works(address, None)
    assert not works(address, None, str(token))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("missing", "cannot read server.tls_cert .*: No such file"),
        ("a pipe", "cannot read server.tls_key .*: it is no plain file"),
        ("garbage", "are no PEM certificate and its key"),
        ("another's key", "are no PEM certificate and its key .*MISMATCH"),
        ("a password", "the key has a password; store it without one"),
        ("no CA", "server.tls_client_ca .* holds no PEM certificate"),
    ],
)
def test_certificates_that_cannot_be_used_keep_the_daemon_from_starting(
    make_daemon: MakeDaemon, ours: Authority, tmp_path: Path, address: str, broken: str, says: str
) -> None:
    server = tls(address, ours)
    if broken == "missing":
        Path(server["tls_cert"]).unlink()
    elif broken == "a pipe":
        Path(server["tls_key"]).unlink()
        os.mkfifo(server["tls_key"])
    elif broken == "garbage":
        Path(server["tls_cert"]).write_text("no certificate")
    elif broken == "a password":
        key = serialization.load_pem_private_key(Path(server["tls_key"]).read_bytes(), None)
        form, cipher = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        Path(server["tls_key"]).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, cipher))
    elif broken == "no CA":
        server["tls_client_ca"] = server["tls_key"]
    else:
        server["tls_key"] = str(Authority(tmp_path / "others").issue("server")[1])
    with pytest.raises(StartupError, match=rf"cannot listen on {address}: .*{says}"):
        make_daemon(server=server)


def test_a_key_that_everybody_can_read_is_warned_of(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    chain, key = ours.issue("server")
    for mode, told in ((0o600, False), (0o640, False), (0o644, True)):
        key.chmod(mode)
        Certificates(chain, key, None)
        assert (f"every user of this machine can read server.tls_key {key}" in caplog.text) == told


def test_renewed_certificates_are_taken_up_and_broken_ones_are_not(
    make_daemon: MakeDaemon, ours: Authority, tmp_path: Path, address: str
) -> None:
    """Goal: a renewed certificate and another CA for clients need no restart; files that cannot be used keep what was read before.

    Method: all are replaced while a client is attached; each step waits until the daemon tells of what it has read.
    """
    clients, others, later = (Authority(tmp_path / name) for name in ("clients", "others", "later"))
    ca = tmp_path / "clients.pem"
    ca.write_bytes(clients.ca.read_bytes())
    server = tls(address, ours, tls_client_ca=str(ca))
    daemon = make_daemon(server=server)
    chain, key = Path(server["tls_cert"]), Path(server["tls_key"])
    mine, theirs = clients.issue("engine"), others.issue("engine")
    with Client(namespace(SIZE), address, credentials=trusting(ours, mine), require=True) as attached:
        assert attached.wait_attached(4.0)
        new = later.issue("server")
        chain.write_bytes(new[0].read_bytes())
        wait_for(lambda: daemon.log().count("until the files are mended") == 1, "a certificate without its key is told")
        assert not works(address, trusting(ours, mine)), "what was read before stays in force"
        key.write_bytes(new[1].read_bytes())
        wait_for(lambda: daemon.log().count("read the certificate") == 1, "a renewed certificate is read")
        former, renewed, unknown = reasons(address, (trusting(ours, mine),), (trusting(later, mine),), (trusting(later, theirs),))
        assert "cannot be reached" in former
        assert not renewed
        assert unknown, "its CA is not known yet"
        os.replace(others.ca, ca)
        wait_for(lambda: daemon.log().count("read the certificate") == 2, "another CA is read")
        known, former = reasons(address, (trusting(later, theirs),), (trusting(later, mine),))
        assert not known
        assert former, "the CA before is not known any more"
        ca.unlink()
        wait_for(lambda: "cannot read server.tls_client_ca" in daemon.log(), "a file that is missing is told")
        assert not works(address, trusting(later, theirs))
        assert attached.save([os.urandom(32)], [bytes(SIZE)]).saved == 1, "what was connected goes on"
    assert daemon.stop() == 0


def test_what_is_plain_or_half_set_is_refused() -> None:
    for flags, says in (
        ({"listen": "0.0.0.0:9460"}, "needs server.tls_cert and server.tls_key, or server.insecure"),
        ({"listen": "0.0.0.0:9460", "tls_cert": "/c"}, "go together"),
        ({"listen": "0.0.0.0:9460", "insecure": True, "tls_client_ca": "/c"}, "tls_client_ca is for TLS"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(env={}, flags={f"server.{key}": value for key, value in flags.items()})
    assert load_config(env={}).server.metrics.startswith("127.0.0.1:"), "metrics are for this machine only"
    assert load_config(env={}).server.listen is None
