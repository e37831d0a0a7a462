"""Settings of the storage backend of SGLang, which are read where there is no SGLang too."""

from __future__ import annotations

import pytest

from kvtierd.connectors.sglang.settings import Settings, read_settings


def test_defaults_and_values() -> None:
    assert read_settings({"backend_name": "kvtierd", "prefetch_threshold": 256}) == Settings()
    given = {"kvtierd.tenant": "search", "kvtierd.address": "unix:/run/k.sock", "kvtierd.load_timeout_ms": 5, "interface_v1": 1}
    assert read_settings(given) == Settings(tenant="search", address="unix:/run/k.sock", load_timeout_ms=5)


@pytest.mark.parametrize("key, value, words", [
    ("adress", "unix:/k", "did you mean kvtierd.address?"),
    ("what", 1, "known: kvtierd.address, "),
    ("address", "localhost:5000", 'a socket on the engine\'s own host, "unix:PATH"'),
    ("address", 7, "is a text"),
    ("tenant", "a/../b", "kvtierd.tenant: "),
    ("kv_dtype", "fp8", "one of fp8_e4m3, fp8_e5m2"),
    ("load_timeout_ms", 0, "milliseconds from 1"),
    ("load_timeout_ms", "5", "milliseconds from 1"),
    ("load_timeout_ms", True, "milliseconds from 1"),
    ("save_timeout_ms", float("nan"), "milliseconds from 1"),
])  # fmt: skip
def test_what_cannot_be_is_told(key: str, value: object, words: str) -> None:
    with pytest.raises(ValueError) as told:
        read_settings({f"kvtierd.{key}": value})
    assert words in str(told.value) and f"kvtierd.{key}" in str(told.value)


def test_only_the_backend_needs_sglang() -> None:
    with pytest.raises(AttributeError, match="no attribute Kvtierd"):
        __import__("kvtierd.connectors.sglang", fromlist=["x"]).Kvtierd  # noqa: B018
