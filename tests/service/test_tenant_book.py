"""Goal: of a tenant's limits all hold that can, whatever has changed since they were set; what cannot is told, is kept, and holds
as soon as it can; and what a configuration's check passes is what the daemon puts into force.

Method: books of tenants with limits set over a configuration, capacities and configurations that change between two starts, and
random configurations.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.config import Config
from kvtierd.core.limits import NO_LIMITS
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.runtime.settings import core_config
from kvtierd.runtime.tenants import TenantBook
from kvtierd.runtime.tokens import Grant
from kvtierd.service.metric_labels import OTHER
from kvtierd.tenant_config import TIER_NAMES, TenantConfig, name_problem

MIB = 1 << 20
VIP = {"class": "premium"}
LARGE, SMALL = (0, 64 * MIB, 64 * MIB), (0, 32 * MIB, 64 * MIB)


def book_of(
    configured: dict[str, dict[str, Any]], overrides: dict[str, dict[str, Any]], capacity: tuple[int, int, int]
) -> TenantBook:
    book = TenantBook({name: TenantConfig.model_validate(config) for name, config in configured.items()}, capacity)
    book.adopt(7, overrides)
    return check(book)


def check(book: TenantBook) -> TenantBook:
    """Reserves fit, quotas are no less, and what is in force is what is said."""
    for tier in Tier:
        assert sum(limits.reserve_bytes[tier] for limits in book.limits.values()) <= book._capacity[tier]
        assert book._reserved[tier] == sum(limits.reserve_bytes[tier] for limits in book.limits.values())
        for name, limits in book.limits.items():
            assert (quota := limits.quota_bytes[tier]) is None or quota >= limits.reserve_bytes[tier]
            assert book.settings(name).reserve(TIER_NAMES[tier]) or not limits.reserve_bytes[tier]
    return book


def change(book: TenantBook, name: str, changes: dict[str, Any], reset: tuple[str, ...] = ()) -> set[str]:
    """Change limits as the runtime does. Returns whose are others now."""
    changed = book.commit(name, book.changed(name, changes, reset))
    check(book)
    assert all(book.limits.get(who) == limits for who, limits in changed.items())
    return set(changed)


def reserve(book: TenantBook, name: str) -> int:
    return book.limits.get(name, NO_LIMITS).reserve_bytes[Tier.CPU] // MIB


def test_a_reserve_that_does_not_fit_takes_no_other_limit_along() -> None:
    """After a restart with less memory all limits of the tenant were out of force."""
    override = VIP | {"cpu_reserve": 40 * MIB, "cpu_ttl": 60.0, "nvme_reserve": 8 * MIB, "scope": "shared"}
    book = book_of({}, {"a": override}, SMALL)
    assert (book.limits["a"].reserve_bytes, book.limits["a"].ttl_s[Tier.CPU], book.limits["a"].shared) == (
        (0, 0, 8 * MIB),
        60.0,
        True,
    )
    assert book.problem("a").startswith("cpu_reserve: the reserves on CPU would be 40MiB") and book.source("a") == "api"
    assert book.after("b", {}) == {"a": override, "b": {}}, "it is kept as it was set"
    assert reserve(book_of({}, {"a": override}, LARGE), "a") == 40
    with pytest.raises(RequestError, match="would be 33MiB in all"):
        book.changed("a", {"cpu_reserve": 33 * MIB})


@pytest.mark.parametrize(
    "configured, override, out, why",
    [
        ({"class": "basic"}, {"hbm_quota": MIB, "cpu_ttl": 60.0}, "hbm_quota", "never in HBM"),
        ({}, {"cpu_reserve": MIB, "cpu_ttl": 60.0}, "cpu_reserve", 'is for class "premium"'),
        (VIP | {"cpu_reserve": "10%"}, {"class": "standard", "cpu_ttl": 60.0}, "cpu_reserve", 'is for class "premium"'),
        (VIP, {"cpu_reserve": 20 * MIB, "cpu_quota": "50%", "cpu_ttl": 60.0}, "cpu_reserve", "cpu_quota (50%) is less"),
        (VIP, {"hbm_reserve": MIB, "cpu_ttl": 60.0}, "hbm_reserve", "no HBM tier"),
        ({}, {"cpu_quota": "lots", "cpu_ttl": 60.0}, "cpu_quota", "'lots' is not a size"),
        ({}, {"scope": "publik", "cpu_ttl": 60.0}, "scope", 'write "private" or "shared"'),
        ({}, {"disk_quota": 5, "cpu_ttl": 60.0}, "disk_quota", "unknown key"),
    ],
)
def test_whatever_cannot_be_goes_alone(configured: dict[str, Any], override: dict[str, Any], out: str, why: str) -> None:
    """Method: what was set before the configuration, or the tiers, became others."""
    book = book_of({"a": configured}, {"a": override}, SMALL)
    assert list(book.problems["a"]) == [out] and why in book.problems["a"][out]
    assert book.limits["a"].ttl_s[Tier.CPU] == 60.0
    assert not any(book.limits["a"].reserve_bytes)
    assert set(change(book, "a", {"cpu_ttl": 30.0})) == {"a"} and list(book.problems["a"]) == [out], "the others can be changed"


def test_a_reserve_falls_back_to_the_configurations() -> None:
    book = book_of({"a": VIP | {"cpu_reserve": "4MiB"}}, {"a": {"cpu_reserve": 40 * MIB}}, SMALL)
    assert reserve(book, "a") == 4 and "cpu_reserve" in book.problems["a"]


def test_what_fitted_together_fits_in_any_order() -> None:
    """One that got more after another had given some up was out of force when the other was changed again."""
    configured = {"a": VIP | {"cpu_reserve": "50%"}, "b": VIP | {"cpu_reserve": "50%"}}
    book = book_of(configured, {}, SMALL)
    change(book, "a", {"cpu_reserve": "10%"})
    change(book, "b", {"cpu_reserve": "90%"})
    change(book, "a", {"cpu_ttl": 60.0})
    assert list(book.overrides) == ["b", "a"]
    again = book_of(configured, book.overrides, SMALL)
    assert again.problems == {} and again.limits == book.limits


def test_a_reserve_comes_into_force_when_there_is_room() -> None:
    overrides = {"a": VIP | {"cpu_reserve": 30 * MIB}, "b": VIP | {"cpu_reserve": 30 * MIB}, "c": {"cpu_ttl": 60.0}}
    book = book_of({}, overrides, SMALL)
    assert (reserve(book, "a"), reserve(book, "b")) == (30, 0)
    assert change(book, "c", {"cpu_ttl": 30.0}) == {"c"}
    assert change(book, "a", {"cpu_reserve": 2 * MIB}) == {"a", "b"}
    assert (reserve(book, "a"), reserve(book, "b"), book.problems) == (2, 30, {})


def test_a_change_puts_nothing_out_of_force() -> None:
    book = book_of({"a": VIP | {"cpu_reserve": "50%"}}, {}, SMALL)
    change(book, "a", {"cpu_reserve": 0})
    change(book, "b", VIP | {"cpu_reserve": 20 * MIB})
    refused: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("a", {}, ("cpu_reserve",)),
        ("a", {"cpu_reserve": 13 * MIB}, ()),
        ("b", {"cpu_quota": 19 * MIB}, ()),
        ("b", {"class": "basic"}, ()),
        ("b", {}, ("class",)),
    ]
    for name, changes, reset in refused:
        with pytest.raises(RequestError) as error:
            book.changed(name, changes, reset)
        assert error.value.reason is Reason.BAD_REQUEST
    with pytest.raises(RequestError, match="lower cpu_reserve of some tenants"):
        book.check("a", {})  # as `tenants rm` would have it
    change(book, "b", {"cpu_reserve": 16 * MIB})
    book.check("a", {})


def test_without_a_part_of_a_tier_the_first_reserves_of_the_configuration_hold() -> None:
    """Method: as when one of several folders is lost; then the daemon did not start."""
    configured = {name: VIP | {"nvme_reserve": "20MiB", "nvme_ttl": "1h"} for name in "abc"}
    book = book_of(configured, {}, (0, 64 * MIB, 32 * MIB))
    assert [book.limits[name].reserve_bytes[Tier.NVME] // MIB for name in "abc"] == [20, 0, 0]
    assert [book.limits[name].ttl_s[Tier.NVME] for name in "abc"] == [3600.0] * 3
    assert set(book.problems) == {"b", "c"} and book.source("b") == "config"
    assert change(book, "a", {"nvme_reserve": 0}) == {"a", "b"}


def test_a_tenant_that_may_not_be_called_so_any_more_has_no_limits() -> None:
    book = book_of({}, {OTHER: {"cpu_quota": 5}, "a b": {"cpu_quota": 5}, "a": {"cpu_quota": 5}}, SMALL)
    assert set(book.limits) == {"a"} and set(book.problems) == {OTHER, "a b"}
    assert "the metrics" in book.problem(OTHER) and book.settings(OTHER) == TenantConfig()
    book.check(OTHER, {})
    assert book.commit(OTHER, None) == {OTHER: None} and book.source(OTHER) == ""


def test_the_name_that_metrics_use_is_nobodys() -> None:
    assert name_problem(OTHER)
    with pytest.raises(RequestError, match="the metrics") as error:
        Grant("t", b"", ("*",)).check_tenant(OTHER)
    assert error.value.reason is Reason.BAD_REQUEST, "no token helps"


AMOUNTS = st.sampled_from([None, "none", 0, "1MiB", "20MiB", "31MiB", "40MiB", "1%", "34%", "50%", "100%"])
TENANT = st.fixed_dictionaries(
    {"class": st.sampled_from(["premium", "premium", "standard"])},
    optional={f"{tier}_{part}": AMOUNTS for tier in TIER_NAMES for part in ("quota", "reserve")},
)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from("abc"), TENANT, max_size=3), st.sampled_from([0, "32MiB"]))
def test_a_check_passes_what_a_start_puts_into_force_and_nothing_else(tenants: dict[str, dict[str, Any]], nvme: Any) -> None:
    sections: dict[str, Any] = {"cpu": {"capacity": "32MiB"}, "nvme": {"capacity": nvme}}
    config = Config.model_validate(sections)
    capacity = core_config(config, config.nvme.block_bytes).capacity_bytes
    assert capacity == config.block_bytes
    try:
        configured = {name: TenantConfig.model_validate(tenant) for name, tenant in tenants.items()}
    except ValueError:
        return
    book = check(TenantBook(configured, capacity))
    try:
        Config.model_validate(sections | {"tenants": tenants})
        passes = True
    except ValueError:
        passes = False
    assert passes is not bool(book.problems)
