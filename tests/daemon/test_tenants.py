"""Goal: tenants of a real daemon get what their limits promise, limits change while sessions go on and survive a restart, and what
cannot be is refused at once with what to do.

Method: a real daemon, clients of several tenants, the admin API and the command line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.cli import cli
from kvtierd.client import Client
from kvtierd.errors import Reason, RequestError, StartupError
from kvtierd.model import Namespace
from kvtierd.tenant_config import TenantConfig
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb
from tests.daemon.conftest import MIB
from tests.daemon.test_hostile import until

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SMALL: dict[str, Any] = {"cpu": {"capacity": "32MiB", "extent": "2MiB"}, "nvme": {"capacity": "0"}}


BAD_NAMES: dict[str, str] = {
    "a\tb": "a tenant name has 1 to 128 printable characters",
    "x" * 129: "a tenant name has 1 to 128 printable characters",
    "my team": "a tenant name has no spaces",
    "team/..": "a tenant name is no path",
    "other": "'other' cannot be a tenant's name",
}


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def put(client: Client, keys: list[bytes], wait_s: float = 5.0) -> int:
    """Save a block of each key's own bytes; returns how many are there afterwards."""
    done = client.save(keys, [key * (MIB // 32) for key in keys], wait_s=wait_s)
    return done.saved + done.held


def get(client: Client, keys: list[bytes]) -> int:
    """Load all that is there, check every byte, and return how many that are."""
    buffers = [bytearray(MIB) for _ in keys]
    loaded = client.load(keys, buffers, each=True)
    good = [bytes(buffer) == key * (MIB // 32) for key, buffer in zip(keys, buffers, strict=True)]
    assert sum(good) == loaded.loaded, "what is called loaded has the right bytes"
    return loaded.loaded


def run(daemon: DaemonProcess, *args: str) -> Result:
    return CliRunner().invoke(cli, [args[0], args[1], "--address", daemon.address, *args[2:]], catch_exceptions=False)


def listed(daemon: DaemonProcess) -> dict[str, Any]:
    result = run(daemon, "tenants", "list", "--json")
    assert result.exit_code == 0, result.output
    return {entry["tenant"]: entry for entry in map(json.loads, result.output.splitlines())}


def quotas(daemon: DaemonProcess) -> dict[tuple[str, str], float]:
    """Quotas by tenant and tier, as the metrics tell them."""
    with daemon.admin() as stub:
        families = text_string_to_metric_families(stub.GetMetrics(pb.GetMetricsRequest(), timeout=10).text)
    (family,) = [f for f in families if f.name == "kvtierd_tenant_quota_bytes"]
    return {(s.labels["tenant"], s.labels["tier"]): s.value for s in family.samples}


def refused(daemon: DaemonProcess, *args: str) -> str:
    result = run(daemon, *args)
    assert result.exit_code in (1, 2), result.output
    return str(result.output)


def test_a_flood_leaves_another_its_blocks(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(**SMALL)
    victim, flood = make_client(daemon, tenant="victim"), make_client(daemon, tenant="flood")
    mine = new_keys(10)
    assert put(victim, mine) == 10
    for _ in range(20):
        put(flood, new_keys(8))
        assert get(victim, mine) >= 10 * 0.95
    used = {t.tenant: t.used_bytes[1] for t in daemon.status().tenants}
    assert used["flood"] >= 20 * MIB, "it has all that the other does not use"


@pytest.mark.parametrize("tenant_class", ["standard", "basic"])
def test_a_flood_faster_than_the_disk_leaves_another_its_memory(
    make_daemon: MakeDaemon, make_client: MakeClient, tenant_class: str
) -> None:
    """The flood's blocks are all still to be written down when it asks for room: it waits, and takes nothing of the other's."""
    sizes: dict[str, Any] = {"cpu": {"capacity": "32MiB", "extent": "2MiB"}, "nvme": {"capacity": "256MiB", "segment": "8MiB"}}
    daemon = make_daemon(**sizes, tenants={"flood": {"class": tenant_class}})
    victim, flood = make_client(daemon, tenant="victim"), make_client(daemon, tenant="flood")
    mine = new_keys(10)
    assert put(victim, mine) == 10
    for _ in range(30):
        put(flood, new_keys(10), wait_s=2.0)
        assert get(victim, mine) == 10
        assert {t.tenant: t.used_bytes[1] for t in daemon.status().tenants}["victim"] == 10 * MIB


def test_alone_a_tenant_uses_everything_and_a_reserve_comes_back(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(**SMALL, tenants={"vip": {"class": "premium", "cpu_reserve": "25%"}})
    flood, vip = make_client(daemon, tenant="flood"), make_client(daemon, tenant="vip")
    put(flood, new_keys(16))
    put(flood, new_keys(16))
    assert {t.tenant: t.used_bytes[1] for t in daemon.status().tenants}["flood"] >= 30 * MIB
    mine = new_keys(8)
    for key in mine:
        assert put(vip, [key]) == 1
    for _ in range(10):
        put(flood, new_keys(8))
    assert get(vip, mine) == 8


def test_basic_goes_first(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(**SMALL, tenants={"low": {"class": "basic"}})
    standard, low, third = (make_client(daemon, tenant=name) for name in ("mid", "low", "new"))
    old, cheap = new_keys(14), new_keys(14)
    assert put(standard, old) == 14
    assert put(low, cheap) == 14
    for _ in range(16):
        put(third, new_keys(2))
        standard.lookup(old)
    assert get(standard, old) == 14, "older, and yet it stays"
    assert low.lookup(cheap, each=True).held < 8


def test_a_quota_of_nothing_and_a_quota_that_is_cut(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(**SMALL, tenants={"none": {"cpu_quota": 0}})
    nothing, cut = make_client(daemon, tenant="none"), make_client(daemon, tenant="cut")
    assert put(nothing, new_keys(2), wait_s=0.0) == 0
    keys = new_keys(20)
    assert put(cut, keys) == 20
    assert run(daemon, "tenants", "set", "cut", "--cpu-quota", "4MiB").exit_code == 0
    with daemon.admin() as stub:
        for _ in range(200):
            if stub.ListTenants(pb.ListTenantsRequest(tenant="cut")).tenants[0].tiers[1].used_bytes <= 4 * MIB:
                break
            cut.lookup(keys)
    facts = listed(daemon)["cut"]
    assert facts["used_bytes"]["cpu"] == facts["quota_bytes"]["cpu"] == 4 * MIB
    assert facts["evictions"]["cpu"] == {"quota": 16} and facts["sessions"] == 1
    assert get(cut, keys) == 4 and put(cut, new_keys(1)) == 1, "its session goes on"
    assert listed(daemon)["none"]["quota_bytes"] == {"hbm": None, "cpu": 0, "nvme": None}


def test_what_cannot_be_is_refused_at_once(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL, tenants={"vip": {"class": "premium", "cpu_reserve": "50%", "cpu_quota": "60%"}})
    set_ = ("tenants", "set", "new")
    assert "lower cpu_reserve" in refused(daemon, *set_, "--class", "premium", "--cpu-reserve", "51%")
    assert "raise the quota" in refused(daemon, *set_, "--class", "premium", "--cpu-reserve", "4MiB", "--cpu-quota", "3MiB")
    assert 'set class = "premium"' in refused(daemon, *set_, "--cpu-reserve", "1MiB")
    for option in ("--nvme-reserve 1MiB", "--nvme-reserve 10%", "--nvme-quota 1MiB", "--ttl-nvme 5m", "--ttl-nvme never"):
        assert "no NVMe tier here; leave nvme_" in refused(daemon, *set_, "--class", "premium", *option.split()), option
    assert "no HBM tier here; leave hbm_quota out" in refused(daemon, *set_, "--hbm-quota", "50%")
    assert "premium" in refused(daemon, *set_, "--class", "gold")
    for amount in ("-1", "nan", "inf", "101%", "-5%", "nan%", "lots"):
        assert "20%" in refused(daemon, *set_, "--cpu-quota", amount), amount
    assert "exclude" in refused(daemon, *set_, "--cpu-quota", "1MiB", "--no-cpu-quota")
    assert "no key" in refused(daemon, *set_, "--reset", "cpu_quta")
    assert "nothing" in refused(daemon, *set_)
    for name, why in BAD_NAMES.items():
        assert why in refused(daemon, "tenants", "set", name, "--cpu-quota", "1MiB")
    assert "NOT_FOUND" in refused(daemon, "tenants", "rm", "new")
    assert "configuration" in refused(daemon, "tenants", "rm", "vip")
    wrong = [
        pb.TenantLimits(tenant_class=9),  # type: ignore[arg-type]
        pb.TenantLimits(write_budget_share=float("nan")),
        pb.TenantLimits(write_budget_share=1.5),
        pb.TenantLimits(cpu=pb.TierLimits(quota=pb.Amount(share=float("inf")))),
        pb.TenantLimits(cpu=pb.TierLimits(quota=pb.Amount())),
        pb.TenantLimits(cpu=pb.TierLimits(quota=pb.Amount(bytes=2**63))),
        pb.TenantLimits(cpu=pb.TierLimits(ttl=pb.OwnTtl(seconds=-1.0))),
        pb.TenantLimits(cpu=pb.TierLimits(ttl=pb.OwnTtl(seconds=float("nan")))),
    ]
    with daemon.admin() as stub:
        for limits in wrong:
            with pytest.raises(grpc.RpcError) as error:
                stub.SetTenant(pb.SetTenantRequest(tenant="new", limits=limits))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert set(listed(daemon)) == {"vip"}, "nothing of it was done"
    daemon.kill()
    with pytest.raises(StartupError, match=r"(?s)status 2.*lower cpu_reserve"):
        make_daemon("other", **SMALL, tenants={name: {"class": "premium", "cpu_reserve": "60%"} for name in "ab"})


def test_one_limit_is_not_set_and_reset_at_once(make_daemon: MakeDaemon) -> None:
    """`--reset cpu_quota --cpu-quota 1MiB` dropped the quota, and said that all was well."""
    daemon = make_daemon(**SMALL)
    options = {"class": ["--class=premium"], "scope": ["--scope=shared"], "write_budget_share": ["--write-budget-share=10%"]}
    for tier in ("hbm", "cpu", "nvme"):
        options[f"{tier}_quota"] = [f"--{tier}-quota=1MiB", f"--no-{tier}-quota"]
        options[f"{tier}_reserve"] = [f"--{tier}-reserve=1MiB"]
        options[f"{tier}_ttl"] = [f"--ttl-{tier}=5m", f"--ttl-{tier}=tier"]
    assert {info.alias or name for name, info in TenantConfig.model_fields.items()} == set(options)
    for key, ways in options.items():
        for way in ways:
            text = refused(daemon, "tenants", "set", "t", way, "--reset=scope", f"--reset={key}")
            assert f"{key} is to be set and to be reset; leave one of the two out" in text
    assert listed(daemon) == {}
    assert run(daemon, "tenants", "set", "t", "--cpu-quota=1MiB", "--reset=scope").exit_code == 0


def test_no_session_and_no_call_names_a_tenant_that_cannot_be(
    make_daemon: MakeDaemon, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_daemon(**SMALL)
    client = make_client(daemon)
    for name, why in BAD_NAMES.items():
        caplog.clear()
        with Client(client.namespace, daemon.address, tenant=name):
            assert until(lambda said=f"no KV cache for now: {why}": said in caplog.text, 30), name  # type: ignore[misc]
        with pytest.raises(RequestError, match=why) as error:
            client.lookup(new_keys(1), tenant=name)
        assert error.value.reason is Reason.BAD_REQUEST


def test_what_was_set_survives_a_restart_and_wins_over_the_file(make_daemon: MakeDaemon) -> None:
    """Set over the configuration, partly; set for one that is not configured; take away; and a capacity that shrinks."""
    daemon = make_daemon(tenants={"file": {"cpu_quota": "10MiB", "cpu_ttl": "5min"}, "plain": {"nvme_ttl": "never"}})
    options = (
        "--class premium --cpu-quota 50% --cpu-reserve 4MiB --ttl-cpu 90s --nvme-ttl never --scope shared --write-budget-share 10%"
    )
    assert run(daemon, "tenants", "set", "api", *options.split()).exit_code == 0
    answer = json.loads(run(daemon, "tenants", "set", "file", "--no-cpu-quota", "--nvme-quota", "0", "--json").output)
    assert answer["kept"] and answer["source"] == "api"
    big = "--class premium --cpu-reserve 40MiB --ttl-cpu 1m"
    assert run(daemon, "tenants", "set", "big", *big.split()).exit_code == 0
    before = listed(daemon)
    for name, quota in (("api", 32 * MIB), ("big", float("inf"))):
        assert quotas(daemon)[name, "cpu"] == quota, "nobody has to come for them first"
    assert quotas(daemon)["file", "nvme"] == 0 and ("plain", "cpu") in quotas(daemon)
    assert daemon.stop() == 0
    daemon.start()
    assert listed(daemon) == before
    assert before["api"]["limits"] == {
        "class": "premium", "scope": "shared", "write_budget_share": 0.1, "hbm_quota": None, "hbm_reserve": 0, "hbm_ttl": None,
        "cpu_quota": "50%", "cpu_reserve": 4 * MIB, "cpu_ttl": 90.0, "nvme_quota": None, "nvme_reserve": 0, "nvme_ttl": "never",
    }  # fmt: skip
    assert before["api"]["quota_bytes"]["cpu"] == 32 * MIB
    assert before["file"]["quota_bytes"] == {"hbm": None, "cpu": None, "nvme": 0} and before["file"]["limits"]["cpu_ttl"] == 300.0
    assert (before["plain"]["source"], before["file"]["source"]) == ("config", "api")
    assert "set by the admin API over those of the configuration" in daemon.log()
    assert daemon.stop() == 0
    daemon.config["cpu"]["capacity"] = "32MiB"
    daemon.start()
    after = listed(daemon)
    assert after["api"]["quota_bytes"]["cpu"] == 16 * MIB, "shares follow the capacity"
    why = "cpu_reserve: the reserves on CPU would be 44MiB in all, and it has 32MiB for blocks; lower cpu_reserve of some tenants"
    assert after["big"]["problem"] == why and after["big"]["reserve_bytes"]["cpu"] == 0
    assert (after["big"]["limits"]["class"], after["big"]["limits"]["cpu_ttl"]) == ("premium", 60.0), "all else holds"
    assert f"not in force for big: {why}" in run(daemon, "tenants", "list").stderr
    assert f"not in force for big: {why}" in run(daemon, "status", "--tenant=big").output
    assert "cpu_reserve of tenant 'big' is not in force" in daemon.log()
    assert "not in force for big" in run(daemon, "tenants", "set", "big", "--ttl-cpu", "2m").stderr, "and can be changed"
    assert run(daemon, "tenants", "set", "big", "--cpu-reserve", "28MiB").stderr == ""
    assert listed(daemon)["big"]["reserve_bytes"]["cpu"] == 28 * MIB
    for name in ("file", "big", "api"):
        assert run(daemon, "tenants", "rm", name).exit_code == 0
    assert daemon.stop() == 0
    daemon.start()
    last = listed(daemon)
    assert set(last) == {"file", "plain"} and last["file"]["quota_bytes"]["cpu"] == 10 * MIB


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1}', "[]", "flipped"])
def test_a_damaged_file_is_put_aside(make_daemon: MakeDaemon, damage: str) -> None:
    daemon = make_daemon()
    assert run(daemon, "tenants", "set", "t", "--cpu-quota", "1MiB").exit_code == 0
    assert daemon.stop() == 0
    path = daemon.folder / "nvme" / "tenants.json"
    text = path.read_text().replace('"version": 1', '"version": 2') if damage == "flipped" else damage
    path.write_text(text)
    daemon.start()
    assert listed(daemon) == {}
    assert (daemon.folder / "nvme" / "tenants.json.damaged-1").read_text() == text
    assert "the limits of tenants in it are not in force" in daemon.log()
    assert run(daemon, "tenants", "set", "t", "--cpu-quota", "2MiB").exit_code == 0
    assert listed(daemon)["t"]["quota_bytes"]["cpu"] == 2 * MIB


def test_nothing_is_changed_that_cannot_be_kept(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    (daemon.folder / "nvme" / "tenants.json.tmp").mkdir()
    assert "no nvme folder could keep it" in refused(daemon, "tenants", "set", "t", "--cpu-quota", "1MiB")
    assert listed(daemon) == {}
    memory = make_daemon("m", **SMALL)
    assert "forgets" in run(memory, "tenants", "set", "t", "--cpu-quota", "1MiB").stderr


def test_a_tenant_with_blocks_or_sessions_is_not_removed_by_mistake(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, tenant="t")
    keys = new_keys(3)
    put(client, keys)
    assert run(daemon, "tenants", "set", "t", "--cpu-quota", "8MiB").exit_code == 0
    text = refused(daemon, "tenants", "rm", "t")
    assert "3 blocks and 1 sessions" in text and "--evict" in text and "--force" in text
    assert run(daemon, "tenants", "rm", "t", "--force").exit_code == 0
    assert get(client, keys) == 3 and listed(daemon)["t"]["source"] == ""
    assert "no limits of its own" in refused(daemon, "tenants", "rm", "t")
    assert "3 copies forgotten" in run(daemon, "tenants", "rm", "t", "--evict").output
    assert get(client, keys) == 0 and put(client, keys) == 3, "its session goes on"


def test_shared_tenants_read_each_others_memory(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    """Blocks of one are loaded by another, from memory and after a restart from NVMe, and never by a private one; a change of scope
    holds for a session that is there."""
    daemon = make_daemon(tenants={"a": {"scope": "shared"}, "b": {"scope": "shared"}})
    a, b, private = (make_client(daemon, tenant=name) for name in ("a", "b", "p"))
    keys = new_keys(4)
    assert put(a, keys) == 4
    assert get(b, keys) == 4 and get(private, keys) == 0
    assert put(b, [*keys, *new_keys(1)]) == 5
    assert {name: listed(daemon)[name]["blocks"] for name in "ab"} == {"a": 4, "b": 1}, "billed to who saved first"
    own = new_keys(2)
    assert put(private, own) == 2
    assert run(daemon, "tenants", "set", "p", "--scope", "shared").exit_code == 0
    assert get(private, keys) == 4 and get(private, own) == 0, "what it saved as private is another realm's"
    assert get(a, own) == 0, "and stays private"
    assert run(daemon, "tenants", "set", "p", "--scope", "private").exit_code == 0
    assert get(private, own) == 2 and get(private, keys) == 0
    for client in (a, b, private):
        client.close()
    assert daemon.stop() == 0
    daemon.start()
    a, b, private = (make_client(daemon, tenant=name) for name in ("a", "b", "p"))
    assert get(b, keys) == 4 and get(private, keys) == 0 and get(private, own) == 2 and get(a, own) == 0


def test_many_tenants_are_listed_page_by_page(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL, tenants={f"t{n:03}": {"cpu_quota": n} for n in range(250)})
    with daemon.admin() as stub:
        names, token = [], ""
        while True:
            page = stub.ListTenants(pb.ListTenantsRequest(page_size=100, page_token=token))
            names += [t.tenant for t in page.tenants]
            token = page.next_page_token
            if not token:
                break
        assert names == [f"t{n:03}" for n in range(250)]
        text = stub.GetMetrics(pb.GetMetricsRequest()).text
    assert len({line.split('tenant="')[1].split('"')[0] for line in text.splitlines() if 'tenant="' in line}) <= 101
    assert "t249" in run(daemon, "tenants", "list").output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thousands_of_tenants_find_their_blocks_after_a_restart(make_daemon: MakeDaemon) -> None:
    """Goal: far more tenants than have memory at a time keep what they saved, each its own.

    Method: one block a tenant under the same key; memory holds those of 64 tenants, the rest goes to NVMe as they come.
    """
    daemon = make_daemon(cpu={"capacity": "64MiB", "extent": "1MiB", "prefault": False}, nvme={"capacity": "1GiB"})
    key, size, count = bytes(32), 4096, 5000

    def content(number: int) -> bytes:
        return number.to_bytes(8, "little") * (size // 8)

    def client_of(number: int) -> Client:
        return Client(Namespace((size,)), daemon.address, tenant=f"tenant-{number}", timeout_s=30.0, require=True)

    for number in range(count):
        with client_of(number) as client:
            assert client.save([key], [content(number)], wait_s=30.0).saved == 1
    daemon.stop()
    daemon.start()
    assert daemon.status().blocks == count
    for number in range(0, count, 53):
        with client_of(number) as client:
            buffer = bytearray(size)
            assert client.load([key], [buffer]).loaded == 1
            assert bytes(buffer) == content(number)
