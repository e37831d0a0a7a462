"""Goal: tenants get what their limits and their class promise, whatever the others do.

Method: a core in virtual time with real contents; small engines that load what is held of a request and save the rest, as a
client does.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtierd.core.limits import NEVER, Limits, TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, QUOTA
from kvtierd.core.shares import WANT_S
from kvtierd.core.tickets import GRANTED
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Result, Tier
from tests.core.shell import Shell, config, key_of
from tests.core.test_load import keys
from tests.core.test_space import Lines

BLOCK = 4096
TIER_BLOCKS = 128
CPU = TIER_BLOCKS * BLOCK
PREMIUM, BASIC = TenantClass.PREMIUM, TenantClass.BASIC


def tier_shell(limits: dict[str, Limits] | None = None, tier: Tier = Tier.CPU, **changes: Any) -> Shell:
    """A daemon whose CPU tier is its last (128 blocks), or that has 128 blocks on NVMe behind a CPU tier of 32."""
    if tier is Tier.CPU:
        sizes = config(cpu=CPU, nvme=0, extent=8 * BLOCK, max_ticket_share=1.0, **changes)
    else:
        sizes = config(cpu=CPU // 4, nvme=2 * CPU, extent=8 * BLOCK, max_ticket_share=1.0, ttl_s=(None, 1.0, None), **changes)
    return Shell(sizes, limits)


class Engine:
    """One tenant's engine: each request is one block, loaded where it is held and saved where it is not."""

    def __init__(self, shell: Shell, tenant: str, shape: int = BLOCK) -> None:
        self.shell = shell
        self.realm = shell.realm(shape, tenant=tenant)
        self.session = shell.attach(self.realm)
        self.asked = self.found = 0

    def use(self, *numbers: int) -> None:
        """Ask for blocks, one after the other."""
        for number in numbers:
            self.asked += 1
            self.shell.now += 1e-4
            key = [key_of(number)]
            if self.shell.get(self.session, self.realm, key):
                self.found += 1
            else:
                for _ in range(8):
                    grant = self.shell.put(self.session, self.realm, key)
                    self.shell.finish_all()
                    if grant.outcomes[0] in (GRANTED, HELD, QUOTA):
                        break
                    self.shell.wait(0.25)

    def held(self, tier: Tier = Tier.CPU) -> int:
        """Blocks that it holds on a tier."""
        return self.realm.tenant.used_bytes[tier] // self.realm.tier_bytes[tier]


def flood(engine: Engine, first: int, count: int) -> None:
    """Save so many new blocks."""
    engine.use(*range(first, first + count))


def ratio(limits: dict[str, Limits], tier: Tier, flooded: bool) -> float:
    """Hit ratio of a tenant with its own working set while another one floods the tier, or does not."""
    shell = tier_shell(limits, tier)
    rng = random.Random(5)
    victim, other = Engine(shell, "victim"), Engine(shell, "flood")
    fresh = 100_000
    if flooded:
        flood(other, 50_000, 2 * TIER_BLOCKS)
    for step in range(500):
        if step == 200:
            victim.asked = victim.found = 0
        victim.use(rng.randrange(48))
        if flooded:
            flood(other, fresh, 6)
            fresh += 6
        shell.wait(0.5)
    shell.check()
    return victim.found / victim.asked


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
@pytest.mark.parametrize("quota_blocks", [40, None])
def test_a_flood_leaves_another_its_hits(tier: Tier, quota_blocks: int | None) -> None:
    """Goal: one tenant floods; the other's hit ratio is at least 95 % of what it has alone, with a quota that is less than its
    working set and without one.

    Method: random requests of one over 48 blocks, of 128 that the tier holds; six new blocks of the other a request.
    """
    size = (BLOCK if tier is Tier.CPU else 2 * BLOCK) * (quota_blocks or 0)
    quota = (None, None, None) if not quota_blocks else (None, size, None) if tier is Tier.CPU else (None, None, size)
    limits = {"victim": Limits(quota)}
    alone, flooded = ratio(limits, tier, False), ratio(limits, tier, True)
    assert alone > (0.6 if quota_blocks else 0.95)
    assert flooded >= 0.95 * alone, (flooded, alone)


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
@pytest.mark.parametrize("tenant_class", [TenantClass.STANDARD, BASIC])
def test_a_flood_that_waits_for_the_disk_takes_nothing_of_another(tenant_class: TenantClass, tier: Tier) -> None:
    """Goal: a flood whose own copies are all still to be written down waits for them, and does not take those of another instead.

    Method: one finds the same 32 blocks all the time; the other saves ten new ones a step, of which the disk takes two.
    """
    sizes = config(cpu=CPU, nvme=8 * CPU if tier is Tier.CPU else 2 * CPU, extent=8 * BLOCK, max_ticket_share=1.0)
    shell = Shell(sizes, {"flood": Limits(tenant_class=tenant_class)})
    victim, other = Engine(shell, "victim"), Engine(shell, "flood")
    mine = keys(*range(32))
    shell.put(victim.session, victim.realm, mine)
    if tier is Tier.NVME:
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
    granted = 0
    for step in range(100):
        shell.wait(0.05)
        ticket = shell.load(victim.session, victim.realm, mine, wait_s=0.0, each=True)
        assert len(shell.collect(ticket)[0]) == 32
        shell.release(ticket)
        granted += shell.put(other.session, other.realm, keys(*range(1000 + 10 * step, 1010 + 10 * step))).outcomes.count(GRANTED)
        assert victim.held() == 32 and victim.held(tier) == 32
        for move_id in list(shell.moves)[:2]:
            shell.finish(move_id)
    assert granted >= TIER_BLOCKS - 32 + 100, "it goes on at the speed of the disk"
    shell.check()


def test_without_shares_a_flood_takes_all() -> None:
    """Goal: the test above sees a flood where nothing holds it. Method: the same with a share of everything."""
    shell = tier_shell(fair_share=1.0)
    victim, other = Engine(shell, "victim"), Engine(shell, "flood")
    victim.use(*range(48))
    shell.wait(1.0)
    flood(other, 1000, 4 * TIER_BLOCKS)
    assert victim.held() == 0


def test_a_flood_uses_everything_while_the_other_is_idle() -> None:
    """Goal: a tenant alone may fill the tier, also with what an idle one held; one that comes back gets its share from it.

    Method: one saves 48 blocks and is silent for longer than a minute; the other saves far more than the tier holds.
    """
    shell = tier_shell()
    one, other = Engine(shell, "one"), Engine(shell, "other")
    one.use(*range(48))
    flood(other, 1000, 2 * TIER_BLOCKS)
    assert one.held() == 48 and other.held() == TIER_BLOCKS - 48, "nobody is idle"
    shell.wait(WANT_S + 1)
    flood(other, 2000, 2 * TIER_BLOCKS)
    assert one.held() == 0 and other.held() == TIER_BLOCKS
    one.use(*range(100))
    assert one.held() >= TIER_BLOCKS // 2 - 8
    assert other.held() >= TIER_BLOCKS // 2 - 8, "within their shares age decides"
    shell.check()


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
def test_the_reserve_of_premium_is_never_taken(tier: Tier) -> None:
    """Goal: what a premium tenant holds within its reserve stays, however idle; what is beyond it may go.

    Method: it fills more than its reserve and is silent; others flood.
    """
    size = BLOCK if tier is Tier.CPU else 2 * BLOCK
    reserve = (0, 32 * size, 0) if tier is Tier.CPU else (0, 0, 32 * size)
    shell = tier_shell({"p": Limits(reserve_bytes=reserve, tenant_class=PREMIUM)}, tier)
    premium, other, third = (Engine(shell, name) for name in ("p", "o", "t"))
    premium.use(*range(56))
    shell.wait(10.0)
    assert premium.held(tier) > 32
    shell.wait(2 * WANT_S)
    for first in range(1000, 1000 + 6 * TIER_BLOCKS, 64):
        flood(other, first, 64)
        flood(third, first, 64)
        shell.wait(2.0)
        assert premium.held(tier) >= 32
    assert premium.held(tier) < 48, "others may have what is beyond the reserve"
    shell.check()


def test_an_idle_reserve_is_lent_and_comes_back_at_once() -> None:
    """Goal: others use all of a tier while a reserve is idle; its owner gets it with its first requests, though all is in use.

    Method: two tenants fill the tier and go on using all of it; the premium one begins.
    """
    shell = tier_shell({"p": Limits(reserve_bytes=(0, 64 * BLOCK, 0), tenant_class=PREMIUM)})
    premium, one, two = (Engine(shell, name) for name in ("p", "1", "2"))
    one.use(*range(64))
    two.use(*range(64))
    assert one.held() + two.held() == TIER_BLOCKS
    for number in range(64):
        # Room changes hands between two calls; a client that waits sees one.
        shell.put(premium.session, premium.realm, keys(number))
        assert shell.put(premium.session, premium.realm, keys(number)).outcomes[0] in (GRANTED, HELD), "at once"
        one.use(number % 8)
        two.use(number % 8)
    assert premium.held() >= 64
    assert shell.core.lookup(shell.now, premium.realm, keys(*range(64)), each=True)[0] == 64
    shell.check()


def test_a_reserve_comes_back_clean_copies_first() -> None:
    """Goal: what is on NVMe too goes before what would have to be written down, though it was used later.

    Method: one extent of a tenant is clean and the younger one, the other dirty and the older one.
    """
    limits = {"p": Limits(reserve_bytes=(0, 8 * BLOCK, 0), tenant_class=PREMIUM)}
    shell = Shell(config(cpu=16 * BLOCK, extent=8 * BLOCK, free_target=0.0, max_ticket_share=1.0), limits)
    other, premium = Engine(shell, "o"), Engine(shell, "p")
    other.use(*range(16))
    clean = [other.realm.index[key_of(n)] for n in range(16)]
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    for block in clean[:8]:
        shell.core.state.evict(shell.now, block.nvme, "request")  # type: ignore[arg-type]
    shell.run()
    shell.wait(1.0)
    other.use(*range(8, 16))
    shell.put(premium.session, premium.realm, keys(1))
    assert shell.put(premium.session, premium.realm, keys(1)).outcomes == [GRANTED]
    assert not shell.moves, "nothing had to be written"
    assert [n for n in range(16) if shell.tiers(other.realm, key_of(n)) == "n"] == list(range(8, 16))


@pytest.mark.parametrize("change", [False, True])
def test_basic_never_enters_hbm(change: bool) -> None:
    """Goal: saves of a basic tenant go to CPU memory, and one that becomes basic leaves HBM. Method: both kinds save into HBM."""
    limits = {} if change else {"b": Limits(tenant_class=BASIC)}
    shell = Shell(config(hbm=CPU, cpu=CPU, extent=8 * BLOCK), limits, into_hbm=True)
    basic, standard = Engine(shell, "b"), Engine(shell, "s")
    basic.use(*range(8))
    standard.use(*range(8))
    if change:
        assert basic.held(Tier.HBM) == 8
        shell.core.set_limits(shell.now, "b", Limits(tenant_class=BASIC))
        shell.run()
        shell.wait(1.0)
        shell.finish_all()
        shell.wait(1.0)
    assert basic.held(Tier.HBM) == 0 and basic.held() == 8
    assert standard.held(Tier.HBM) == 8
    assert not shell.put_hbm(basic.realm, key_of(99))
    assert shell.get(basic.session, basic.realm, keys(*range(8))) == list(range(8))
    shell.check()


def test_basic_is_written_down_first_and_goes_first() -> None:
    """Goal: under pressure the copies of a basic tenant go down, and go, before older ones of others.

    Method: an older standard tenant and a younger basic one share a tier; the watermark, then a third one's saves.
    """
    limits = {"b": Limits(tenant_class=BASIC)}
    shell = Shell(config(cpu=CPU, nvme=16 * CPU, extent=8 * BLOCK, free_target=0.2, max_ticket_share=1.0), limits)
    standard, basic, third = (Engine(shell, name) for name in ("s", "b", "t"))
    standard.use(*range(64))
    shell.now += 5.0
    for number in range(48):
        shell.put(basic.session, basic.realm, keys(number))
    assert {m.src.block.realm.tenant.name for m, _ in shell.moves.values()} == {"b"}, "the watermark begins with basic"
    shell.finish_all()
    shell.now += 5.0
    third.use(*range(48))
    assert third.held() > 40 and standard.held() == 64 and basic.held() < 24
    shell.check()


def test_basic_goes_first_on_the_last_tier() -> None:
    """The same where copies go for good: NVMe."""
    shell = tier_shell({"b": Limits(tenant_class=BASIC)}, Tier.NVME)
    standard, basic, third = (Engine(shell, name) for name in ("s", "b", "t"))
    for engine in (standard, basic):
        engine.use(*range(60))
        shell.wait(10.0)
        shell.finish_all()
    third.use(*range(60))
    shell.wait(10.0)
    shell.finish_all()
    assert standard.held(Tier.NVME) == 60
    assert basic.held(Tier.NVME) < 20
    assert basic.realm.tenant.evictions[(Tier.NVME, "pressure")] > 40
    shell.check()


def test_quota_of_nothing() -> None:
    """Goal: a quota of 0 is a quota, not none: nothing is granted, nothing breaks, and no quota is no limit.

    Method: saves, loads of what another tier holds, and going down, with a quota of 0 on each tier.
    """
    shell = Shell(config(extent=8 * BLOCK), {"none": Limits((0, 0, 0)), "low": Limits((None, None, 0))})
    nothing, low, free = (Engine(shell, name) for name in ("none", "low", "free"))
    assert shell.save(nothing.session, nothing.realm, keys(1, 2)).outcomes == [QUOTA, QUOTA]
    low.use(1, 2)
    free.use(1, 2)
    shell.drain()
    shell.finish_all()
    assert shell.tiers(free.realm, key_of(1)) == "cn" and shell.tiers(low.realm, key_of(1)) == "c"
    assert shell.core.undrained_bytes == 0, "what cannot go down is not waited for"
    shell.drain(on=False)
    shell.evict(free.realm, keys(1, 2), Tier.CPU)
    shell.core.set_limits(shell.now, "free", Limits((None, 0, None)))
    ticket = shell.load(free.session, free.realm, keys(1, 2))
    assert shell.collect(ticket) == ([], True), "no memory to load into: a miss"
    shell.core.set_limits(shell.now, "free", None)
    assert shell.get(free.session, free.realm, keys(1, 2)) == [0, 1]
    shell.check()


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (Limits(), 32),
        (Limits((None, 20 * BLOCK, None)), 10),
        (Limits((None, 100 * BLOCK, None)), 32),
        (Limits(reserve_bytes=(0, 80 * BLOCK, 0), tenant_class=PREMIUM), 40),
    ],
)
def test_a_tenant_pins_half_of_what_is_its_own(limits: Limits, most: int) -> None:
    """Goal: pins of a tenant hold half of its share or quota, whichever is less; an operator's count for no tenant.

    Method: 128 blocks of room, one tenant that holds as many as it may; pinned one by one, then taken back.
    """
    shell = Shell(config(cpu=CPU, nvme=0, extent=8 * BLOCK, free_target=0.0), {"one": limits})
    one = Engine(shell, "one")
    flood(one, 0, 100)
    held = [n for n in range(100) if shell.tiers(one.realm, key_of(n))]
    pins = [shell.pin(one.realm, keys(n), 100.0) for n in held[:most]]
    with pytest.raises(RequestError, match="pins of tenant 'one' would hold") as error:
        shell.pin(one.realm, keys(held[most]), 100.0)
    assert error.value.reason is Reason.LIMIT
    operators = shell.core.pin(shell.now, [one.realm], keys(*held[most : most + 4]), shell.now + 100.0)
    assert len(operators.copies) == 4
    shell.core.unpin(shell.now, pins[0].ticket_id, "one")
    assert shell.pin(one.realm, keys(held[-1]), 100.0).copies, "what was taken back counts no more"
    shell.check()


def test_a_pin_counts_for_a_tenant_that_was_forgotten_and_came_back() -> None:
    """Goal: who pins what another tenant has saved in a shared scope, leaves and comes back, has pinned it still.

    Method: 32 of 128 blocks are another's and pinned; all places for namespaces are wanted in between, so that the tenant goes.
    """
    shell = Shell(config(cpu=CPU, nvme=0, extent=8 * BLOCK, max_realms=2), {name: Limits(shared=True) for name in ("one", "other")})
    other = Engine(shell, "other")
    flood(other, 0, 40)
    guest = Engine(shell, "one")
    assert len(shell.pin(guest.realm, keys(*range(32)), 500.0).copies) == 32
    shell.detach(guest.session)
    shell.realm(BLOCK, tenant="third")
    assert "one" not in shell.core.state.tenants, "there was no place for both"
    again = shell.realm(BLOCK, tenant="one")
    with pytest.raises(RequestError, match="pins of tenant 'one' would hold"):
        shell.pin(again, keys(33), 100.0)


@pytest.mark.parametrize("below", [True, False])
def test_a_cut_quota_is_drained_gradually(below: bool) -> None:
    """Goal: after a cut a tenant's oldest blocks go down (or for good where nothing is below), a portion a tick, nobody else's, and
    what is pinned or being read stays.

    Method: 1,000 blocks, the two oldest of them pinned and being loaded; the quota becomes 100.
    """
    shell = Shell(config(cpu=2048 * BLOCK, nvme=(8192 if below else 0) * BLOCK, extent=64 * BLOCK, free_target=0.0))
    one, other = Engine(shell, "one"), Engine(shell, "other")
    for engine in (one, other):
        for number in range(1000):
            shell.put(engine.session, engine.realm, keys(number))
            shell.now += 0.001
    pinned = shell.pin(one.realm, keys(0), 500.0)
    ticket = shell.load(one.session, one.realm, keys(1))
    shell.collect(ticket)
    shell.core.set_limits(shell.now, "one", Limits((None, 100 * BLOCK, None)))
    shell.run()
    assert one.held() == 1000, "the change itself takes nothing away"
    sizes = [one.held()]
    while one.held() > 100:
        before = shell.now
        shell.core.tick(shell.core.next_deadline() or pytest.fail("nothing is due"))
        shell.now = max(shell.now, before + 0.05)
        shell.run()
        shell.finish_all()
        sizes.append(one.held())
    assert 3 < len(sizes) < 40 and sizes == sorted(sizes, reverse=True)
    assert other.held() == 1000
    held = [n for n in range(1000) if "c" in shell.tiers(one.realm, key_of(n))]
    assert held == [0, 1, *range(902, 1000)]
    found = shell.core.lookup(shell.now, one.realm, keys(*range(1000)), each=True)[0]
    assert found == (1000 if below else 100)
    shell.release(ticket)
    shell.core.unpin(shell.now, pinned.ticket_id)
    shell.check()
    assert shell.wait(100.0) < 200, "it comes to rest"


def test_a_cut_goes_on_where_nothing_below_takes_what_is_too_much() -> None:
    """Goal: a tenant comes down to its quota even if the tier below has room for newer blocks of it only.

    Method: a quota of two blocks on NVMe, which two blocks have that were used last; then CPU memory is cut to three.
    """
    shell = Shell(config(cpu=64 * BLOCK, extent=8 * BLOCK), {"t": Limits((None, None, 4 * BLOCK))})
    engine = Engine(shell, "t")
    engine.use(1, 2)
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    engine.use(3, 4, 5, 6, 1, 2)
    shell.core.set_limits(shell.now, "t", Limits((None, 3 * BLOCK, 4 * BLOCK)))
    shell.wait(5.0)
    shell.finish_all()
    shell.wait(5.0)
    assert [n for n in range(1, 7) if "c" in shell.tiers(engine.realm, key_of(n))] == [1, 2, 6]
    shell.check()


def test_limits_change_while_sessions_go_on() -> None:
    """Goal: each limit holds from its change on, for tenants that are there and for those that come later; open tickets end well.

    Method: quota, TTLs, class and reserve are changed between a save's grant and its commit, and while a load is open.
    """
    shell = Shell(config(extent=8 * BLOCK))
    core = shell.core
    engine = Engine(shell, "t")
    grant = shell.save(engine.session, engine.realm, keys(1, 2))
    core.set_limits(shell.now, "t", Limits((None, BLOCK, None), ttl_s=(None, 5.0, None)))
    shell.commit(grant.ticket_id)
    shell.wait(1.0)
    shell.finish_all()
    assert engine.held() == 1, "one block fits"
    shell.wait(5.0)
    shell.finish_all()
    assert shell.tiers(engine.realm, key_of(1)) == "n", "its new TTL"
    core.set_limits(shell.now, "t", Limits(ttl_s=(None, NEVER, None)))
    assert shell.get(engine.session, engine.realm, keys(1)) == [0]
    shell.wait(10_000.0)
    assert shell.tiers(engine.realm, key_of(1)) == "cn", "no TTL, though the tier has one"
    core.set_limits(shell.now, "t", None)
    shell.wait(1.0)
    assert shell.tiers(engine.realm, key_of(1)) == "n", "the tier's TTL again"
    core.set_limits(shell.now, "later", Limits((None, 0, None)))
    later = Engine(shell, "later")
    assert shell.save(later.session, later.realm, keys(1)).outcomes == [QUOTA]
    shell.check()


def test_a_quota_that_became_less_over_a_restart_is_drained() -> None:
    """Goal: recovered blocks beyond the quota of today go. Method: 20 blocks are recovered under a quota of four."""
    shell = Shell(config(nvme=64 * 2 * BLOCK, extent=64 * 2 * BLOCK), {"t": Limits((None, None, 4 * 2 * BLOCK))})
    realm = shell.realm(BLOCK)
    core = shell.core
    core.recover_extent(1, 2 * BLOCK, 64)
    core.recover_blocks(0.0, [(realm.realm_id, key_of(n), n + 1, ((1 << 32) + n,), NEVER) for n in range(20)])
    core.recovered(100, 2)
    core.tick(core.next_deadline() or pytest.fail("nothing is due"))
    core.check()
    assert core.lookup(1.0, realm, keys(*range(20)), each=True)[1] == bytes(16) + bytes([Tier.NVME.bit]) * 4


# ---- shared scope


def shared_shell(**limits: Limits) -> Shell:
    return Shell(config(cpu=CPU, extent=8 * BLOCK), {"a": Limits(shared=True), "b": Limits(shared=True)} | limits)


def test_shared_blocks_are_found_by_all_who_share_and_billed_once() -> None:
    """Goal: what one shared tenant saved the other finds and loads; a save of it grants nothing; private tenants and other
    namespaces find nothing of it; the first saver is billed, and its own evictions alone take it away.

    Method: two shared tenants and a private one, the same keys.
    """
    shell = shared_shell()
    a, b, private, other = Engine(shell, "a"), Engine(shell, "b"), Engine(shell, "p"), Engine(shell, "b", 2 * BLOCK)
    a.use(*range(4))
    grant = shell.put(b.session, b.realm, keys(3, 4))
    assert grant.outcomes == [HELD, GRANTED]
    assert (a.held(), b.held()) == (4, 1)
    for realm in (a.realm, b.realm):
        assert shell.core.lookup(shell.now, realm, keys(*range(5)))[0] == 5
        assert len(shell.core.lookup_packed(shell.now, realm, b"".join(keys(*range(5)) * 40), each=True)[1].strip(b"\0")) == 200
    for realm in (private.realm, other.realm):
        assert shell.core.lookup(shell.now, realm, keys(*range(5)), each=True)[0] == 0
    ticket = shell.core.load(shell.now, b.session, b.realm, keys(*range(5)), shell.now + 1, each=False)
    indexes, slots, done = shell.core.collect(shell.now, ticket)
    assert (indexes, done) == (list(range(5)), True)
    assert [shell.content[(Tier.CPU, s)][0] for s in slots] == [a.realm.realm_id] * 4 + [b.realm.realm_id]  # type: ignore[index]
    shell.core.release(shell.now, b.session, ticket.ticket_id)
    assert b.realm.tenant.hits[Tier.CPU] == 5 and not a.realm.tenant.hits[Tier.CPU], "hits count for who asks"
    assert shell.core.evict_keys(shell.now, b.realm, keys(*range(5))) == 1, "its own alone"
    assert shell.core.lookup(shell.now, b.realm, keys(*range(5)))[0] == 4
    assert len(shell.core.pin(shell.now, [a.realm, b.realm], keys(1), 5.0).copies) == 1, "one block, however many find it"
    shell.core.check()


def test_what_was_saved_as_private_is_never_shared() -> None:
    """Goal: a change of scope changes who finds what is saved from then on, and nothing else. Method: there and back again."""
    shell = shared_shell()
    b, before = Engine(shell, "b"), Engine(shell, "c")
    before.use(1)
    shell.core.set_limits(shell.now, "c", Limits(shared=True))
    after = Engine(shell, "c")
    assert after.realm is not before.realm
    after.use(2)
    assert shell.core.lookup(shell.now, b.realm, keys(1, 2), each=True)[1] == bytes([0, Tier.CPU.bit])
    assert shell.core.lookup(shell.now, before.realm, keys(1, 2), each=True)[1] == bytes([Tier.CPU.bit, 0])
    shell.core.set_limits(shell.now, "c", None)
    assert Engine(shell, "c").realm is before.realm
    shell.check()


def test_a_shared_block_moves_and_goes_as_its_owners() -> None:
    """Goal: whoever reads it, a shared block keeps to the limits of who saved it, on its way down, up and out.

    Method: an owner with a quota of two blocks; the other one reads what is on NVMe.
    """
    shell = shared_shell(a=Limits((None, 2 * BLOCK, None), shared=True))
    a, b = Engine(shell, "a"), Engine(shell, "b")
    a.use(1, 2)
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    a.use(3)
    assert shell.tiers(b.realm, key_of(1)) == "n"
    assert shell.get(b.session, b.realm, keys(1)) == [0]
    assert a.held() == 2 and b.held() == 0
    shell.evict(a.realm, keys(1, 2, 3))
    b.use(1)
    assert (a.held(), b.held()) == (0, 1)
    shell.check()


def test_a_forgotten_shared_realm_leaves_the_others() -> None:
    """Goal: an unused shared realm gives its place up, and the index stays with those that use it. Method: two places."""
    shell = Shell(config(max_realms=2), {"a": Limits(shared=True), "b": Limits(shared=True)})
    a, b = Engine(shell, "a"), Engine(shell, "b")
    b.use(1)
    shell.detach(a.session)
    third = shell.realm(BLOCK, tenant="c")
    assert a.realm.realm_id not in shell.core.state.realms
    assert shell.core.lookup(shell.now, b.realm, keys(1))[0] == 1
    assert shell.core.state.commons == {b.realm.fingerprint: [b.realm]}
    assert third.index is not b.realm.index
    shell.check()


# ---- the write budget


def test_a_share_of_the_write_budget_is_a_ceiling() -> None:
    """Goal: a tenant writes no more than its share, others all of the rest, and a share of nothing writes nothing.

    Method: a budget of 64 blocks; two tenants with shares of a quarter and of nothing, and one without.
    """
    size = 2 * BLOCK
    limits = {"quarter": Limits(write_budget_share=0.25), "nothing": Limits(write_budget_share=0.0)}
    shell = Shell(config(cpu=512 * BLOCK, nvme=512 * size, extent=64 * BLOCK, write_budget_bytes=64 * size), limits)
    engines = [Engine(shell, name) for name in ("quarter", "nothing", "all")]
    for engine in engines:
        for number in range(60):
            shell.put(engine.session, engine.realm, keys(number))
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
    assert [engine.held(Tier.NVME) for engine in engines] == [16, 0, 48]
    shell.core.set_limits(shell.now, "quarter", Limits(write_budget_share=1.0))
    shell.wait(86_400.0)
    for number in range(100, 160):
        shell.put(engines[0].session, engines[0].realm, keys(number))
    shell.drain()
    shell.finish_all()
    assert engines[0].held(Tier.NVME) == 76
    shell.check()


# ---- many


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
def test_cost_does_not_grow_with_tenants(tier: Tier) -> None:
    """Goal: the work of a save that has to make room is about the same with 20 and with 10,000 tenants of all classes, with quotas
    and reserves, whether the asking one is above its share or within it.

    Method: count executed lines of the core; the tier is full, with a block of each tenant; then limits of some are changed.
    """

    def cost(count: int) -> float:
        capacity = count * 2 * BLOCK
        nvme = 0 if tier is Tier.CPU else capacity
        kinds = [
            Limits(), Limits((None, 64 * BLOCK, None)), Limits(tenant_class=BASIC),
            Limits(reserve_bytes=(0, BLOCK, 0), tenant_class=PREMIUM),
        ]  # fmt: skip
        limits = {str(n): kinds[n % 4] for n in range(count)}
        sizes = config(
            cpu=capacity, nvme=nvme, extent=2 * BLOCK if tier is Tier.CPU else 64 * BLOCK, free_target=0.0, max_realms=count,
            max_ticket_share=1.0, ttl_s=(None, None, None),
        )  # fmt: skip
        shell = Shell(sizes, limits)
        core = shell.core
        realms = [shell.realm(BLOCK, tenant=str(n)) for n in range(count)]
        session = core.attach(1, realms[0])

        def put(now: float, realm: Realm, *numbers: int) -> None:
            grant = core.save(now, session, realm, keys(*numbers))
            if grant.ticket_id:
                core.commit(now, session, grant.ticket_id)
            for command in core.take_commands():
                for move in getattr(command, "moves", ()):
                    core.move_done(now, move.move_id, Result.OK)
                if type(command).__name__ == "RetireExtent":
                    core.extent_released(now, command.tier, command.extent_id)

        for n, realm in enumerate(realms):
            put(n / count, realm, 1, 2)

        def work(first: int, steps: int) -> None:
            for step in range(first, first + steps):
                now = 2.0 + step / 10
                put(now, realms[step * 7 % count], 3 + step)
                if step % 10 == 0:
                    core.set_limits(now, str(step), kinds[step // 10 % 4])
                core.tick(now)
                core.next_deadline()

        work(0, 20)
        with Lines() as lines:
            work(20, 60)
        core.check()
        return lines.count / 60

    few, many = cost(20), cost(10_000)
    assert many < 3 * few, f"{few} lines with few tenants, {many} with many"


def test_states_are_known() -> None:
    """Goal: who is looked after is found again after limits changed. Method: a tenant above its share becomes basic and back."""
    shell = tier_shell()
    engine = Engine(shell, "t")
    flood(engine, 0, TIER_BLOCKS)
    shares = shell.core.state.shares
    other = Engine(shell, "o").realm.tenant
    assert shares.furthest_above(Tier.CPU, other) is engine.realm.tenant
    for limits in (Limits(tenant_class=BASIC), Limits(tenant_class=PREMIUM, reserve_bytes=(0, CPU, 0)), None):
        shell.core.set_limits(shell.now, "t", limits)
        shell.core.check()
        assert bool(shares.basic(Tier.CPU)) is (limits is not None and limits.tenant_class is BASIC)


def test_a_reserve_keeps_no_more_for_a_namespace_with_large_blocks() -> None:
    """Goal: what a premium tenant holds above its reserve others can have, whatever else the tenant might save.

    Method: it fills the tier with small blocks and has a namespace of large ones, in which it holds nothing.
    """
    shell = tier_shell({"p": Limits((None, None, None), (0, CPU // 2, 0), tenant_class=PREMIUM)})
    premium, other = Engine(shell, "p"), Engine(shell, "o")
    shell.realm(40 * BLOCK, tenant="p")
    premium.use(*range(TIER_BLOCKS))
    assert premium.held() == TIER_BLOCKS
    shell.wait(1.0)
    other.use(*range(16))
    assert other.held() >= 8 and premium.held() >= TIER_BLOCKS // 2
    shell.check()


def test_a_reserve_on_nvme_holds_for_a_whole_segment() -> None:
    """Goal: a segment goes for blocks of another size only when what its tenant keeps elsewhere is as much as its reserve.

    Method: one segment with four blocks of a tenant whose reserve is three of them.
    """
    block_bytes = 2 * BLOCK  # with its header page
    limits = {"t": Limits(reserve_bytes=(0, 0, 3 * block_bytes), tenant_class=PREMIUM)}
    shell = Shell(config(nvme=8 * block_bytes, extent=8 * block_bytes), limits)
    kept, other = shell.realm(BLOCK, tenant="t"), shell.realm(3 * BLOCK, tenant="u")
    for realm in (kept, other):
        shell.put(shell.attach(realm), realm, keys(1, 2, 3, 4))
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
    assert [shell.tiers(kept, key) for key in keys(1, 2, 3, 4)] == ["cn"] * 4
    assert [shell.tiers(other, key) for key in keys(1, 2, 3, 4)] == ["c"] * 4
    shell.check()
