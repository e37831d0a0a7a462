"""Goal: a request's kv_transfer_params are read exactly, kvtierd's names before LMCache's, and errors name key and allowed values.

Method: tables of parameters and results; random parameters never raise anything but ValueError.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.connectors.lmcache_keys import REQUEST, Effect
from kvtierd.connectors.params import KEYS, RequestSettings, request_settings


@pytest.mark.parametrize(
    "params, expected",
    [
        (None, RequestSettings()),
        ({}, RequestSettings()),
        ({"do_remote_decode": True, "lmcache.other": 1, "lmcache.tag.user": "u"}, RequestSettings()),
        ({"lmcache.tag.tenant": "a"}, RequestSettings(tenant="a")),
        ({"lmcache.tag.tenant": 7}, RequestSettings(tenant="7")),
        ({"lmcache.tag.tenant": "a", "kvtierd.tenant": "b"}, RequestSettings(tenant="b")),
        ({"lmcache.tag.tenant": "a", "kvtierd.tenant": None}, RequestSettings(tenant="a")),
        ({"lmcache.ttl": 30}, RequestSettings(ttl_s=30.0)),
        ({"lmcache.ttl": 30, "kvtierd.ttl": "10min"}, RequestSettings(ttl_s=600.0)),
        ({"lmcache.skip_save": True}, RequestSettings(skip_save=True)),
        ({"lmcache.skip_save": True, "kvtierd.skip_save": False}, RequestSettings()),
        ({"lmcache.skip_save": "false"}, RequestSettings()),
        ({"kvtierd.skip_load": "true"}, RequestSettings(skip_load=True)),
        ({"kvtierd.pin": True}, RequestSettings(pin_s=3600.0)),
        ({"kvtierd.pin": "true"}, RequestSettings(pin_s=3600.0)),
        ({"kvtierd.pin": False}, RequestSettings()),
        ({"kvtierd.pin": 12.5}, RequestSettings(pin_s=12.5)),
        ({"kvtierd.pin": 1}, RequestSettings(pin_s=1.0)),
        ({"kvtierd.max_load_tokens": 0, "lmcache.max_offload_tokens": 64}, RequestSettings(max_load_tokens=0, max_save_tokens=64)),
        ({"kvtierd.max_save_tokens": "5", "lmcache.max_offload_tokens": 64}, RequestSettings(max_save_tokens=5)),
        ({"kvtierd.max_load_tokens": 4.0}, RequestSettings(max_load_tokens=4)),
    ],
)
def test_parameters(params: dict[str, object] | None, expected: RequestSettings) -> None:
    assert request_settings(params) == expected


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("kvtierd.tenant", "", "1 to 128 printable"),
        ("lmcache.tag.tenant", "x" * 129, "1 to 128 printable"),
        ("kvtierd.tenant", "a\nb", "1 to 128 printable"),
        ("kvtierd.tenant", ["a"], "1 to 128 printable"),
        ("kvtierd.tenant", "a b", "no spaces"),
        ("lmcache.tag.tenant", "a/..", "no path"),
        ("kvtierd.tenant", "other", "the metrics call"),
        ("kvtierd.ttl", 0, "seconds above 0"),
        ("kvtierd.ttl", -1, "seconds above 0"),
        ("kvtierd.ttl", float("inf"), "seconds above 0"),
        ("lmcache.ttl", "soon", "seconds above 0"),
        ("kvtierd.ttl", True, "seconds above 0"),
        ("kvtierd.pin", "long", "true means 3600 seconds"),
        ("kvtierd.skip_save", "maybe", "true or false"),
        ("lmcache.skip_save", {}, "true or false"),
        ("kvtierd.max_load_tokens", -1, "whole number of tokens"),
        ("kvtierd.max_save_tokens", 1.5, "whole number of tokens"),
        ("lmcache.max_offload_tokens", True, "whole number of tokens"),
        ("kvtierd.max_load_tokens", 10**400, "whole number of tokens"),
        ("kvtierd.tenantt", 1, "did you mean kvtierd.tenant?"),
        ("kvtierd.zzz", 1, "kvtierd.max_save_tokens"),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        request_settings({key: value})
    assert key in str(error.value) and allowed in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_the_table_names_what_is_read() -> None:
    for row in REQUEST:
        for name in row.names:
            value: Any = {"lmcache.tag.tenant": "t", "lmcache.skip_save": True}.get(name, 5)
            assert (request_settings({name: value}) != RequestSettings()) == (row.effect is Effect.USED)


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200) | st.lists(st.integers(), max_size=2)
_NAMES = st.sampled_from([f"kvtierd.{k}" for k in KEYS] + [row.names[0] for row in REQUEST]) | st.text(max_size=20)


@given(st.dictionaries(_NAMES, _VALUES, max_size=5))
def test_random_parameters_end_in_settings_or_a_value_error(params: dict[str, Any]) -> None:
    try:
        found = request_settings(params)
    except ValueError:
        return
    assert found.ttl_s is None or 0 < found.ttl_s < 1e9
    assert found.pin_s is None or 0 < found.pin_s < 1e9
    assert len(found.tenant) <= 128 and found.tenant.isprintable()
    assert all(n is None or n >= 0 for n in (found.max_load_tokens, found.max_save_tokens))


@pytest.mark.parametrize("params", ["kvtierd.pin", ["kvtierd.pin"], 5, True, ("a",)])
def test_parameters_that_are_no_table_are_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params map names to values"):
        request_settings(params)
