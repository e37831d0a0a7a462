"""Goal: the doctor says who may call, and what keeps a daemon with tokens or TCP from being what was meant.

Method: token files and addresses as a configuration names them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtierd.cli.checks_access import check_limits, check_listen, check_tokens
from kvtierd.cli.findings import Finding, Level
from kvtierd.config import Config

DIGEST = 'sha256 = "' + "ab" * 32 + '"\n'


def tokens(path: Path, text: str, unix_tokens: str = "all") -> Finding:
    path.write_text(text)
    [finding] = check_tokens(Config(server={"token_file": path, "unix_tokens": unix_tokens}))  # type: ignore[arg-type]
    return finding


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    assert not list(check_tokens(Config()))
    good = f'[tokens.a]\n{DIGEST}tenants = ["a"]\n'
    assert tokens(path, good + "admin = true\n").level is Level.OK
    without = tokens(path, good)
    assert (without.level, "admin API" in without.meaning) == (Level.WARN, True)
    assert tokens(path, good, "none").level is Level.OK, "the unix socket takes no token for it"
    useless = tokens(path, f"[tokens.idle]\n{DIGEST}")
    assert (useless.level, "idle" in useless.found) == (Level.WARN, True)
    broken = tokens(path, "[tokens.a]\n")
    assert (broken.level, "needs one of" in broken.found) == (Level.ERROR, True)


@pytest.mark.parametrize(
    "server, level",
    [
        ({"listen": ":9460", "insecure": True}, Level.WARN),
        ({"listen": ":9460", "insecure": True, "token_file": "/t"}, Level.WARN),
        ({"listen": ":9460", "tls_cert": "/c", "tls_key": "/k"}, Level.WARN),
        ({"listen": ":9460", "tls_cert": "/c", "tls_key": "/k", "token_file": "/t"}, Level.OK),
        ({"listen": ":9460", "tls_cert": "/c", "tls_key": "/k", "tls_client_ca": "/a"}, Level.OK),
    ],
)
def test_tcp(server: dict[str, Any], level: Level) -> None:
    [finding] = check_listen(Config(server=server))  # type: ignore[arg-type]
    assert finding.level is level
    assert finding.fix or level is Level.OK
    assert not list(check_listen(Config()))


def limits(gpus: int, tenants: dict[str, Any], **sections: Any) -> Finding:
    [finding] = check_limits(Config.model_validate({"tenants": tenants} | sections), gpus)
    return finding


def test_limits_of_tenants() -> None:
    assert not list(check_limits(Config(), 0))
    reserve = {"vip": {"class": "premium", "hbm_reserve": "3GiB", "cpu_reserve": "10%"}}
    hbm = {"capacity": "2GiB"}
    assert limits(2, reserve, hbm=hbm).level is Level.OK
    small = limits(1, reserve, hbm=hbm)
    assert (small.level, "3GiB in all" in small.found, "1 GPUs" in small.meaning) == (Level.ERROR, True, True)
    assert limits(0, reserve, hbm=hbm).level is Level.OK, "that there is no GPU is another check's"
    idle = limits(0, {"a": {"nvme_quota": "1GiB", "hbm_ttl": "1min"}, "b": {"hbm_quota": 0}}, nvme={"capacity": 0})
    assert (idle.level, idle.found) == (Level.WARN, "hbm_ttl, nvme_quota are set")
