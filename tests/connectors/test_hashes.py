"""Goal: two chunks have the same key exactly when their KV is the same, in every process that can share.

Method: requests of vLLM's own; what must and what must not change a key is tried one by one, with vLLM's hashes and with the chain
that takes their place where they differ from process to process. Fresh processes are asked too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils

from kvtierd.connectors.vllm import adapters, hashes
from kvtierd.connectors.vllm.hashes import Keys, resolve_hashing
from tests.connectors.parts import BLOCK, CHUNK, request

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
FIXED = hasattr(kv_cache_utils, "get_none_hash_seed")
"""This vLLM's hashes are the same in every process."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "WAIT_S", 20.0)  # for slow machines


def make(own_chain: bool = False, groups: int = 1) -> Keys:
    return Keys(CHUNK, BLOCK, groups, own_chain=own_chain)


def lora(name: str = "a", path: str = "/nowhere", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, path)


@pytest.fixture(params=[False, True], ids=["engine's", "own"])
def own_chain(request: Any) -> bool:
    return bool(request.param)


# ---- what is counted


def test_whole_chunks_of_confirmed_tokens(own_chain: bool) -> None:
    keys = make(own_chain)
    assert [keys.count(request(tokens=n)) for n in (0 + 1, CHUNK - 1, CHUNK, CHUNK + BLOCK, 2 * CHUNK)] == [0, 0, 1, 1, 2]
    growing = request(tokens=CHUNK - 1)
    growing.append_output_token_ids(7)
    assert keys.count(growing) == 1


def test_a_request_without_hashes_has_no_keys() -> None:
    bare = SimpleNamespace(request_id="r", block_hashes=[], lora_request=None, num_tokens=1000)
    assert make().count(bare) == 0
    assert make().keys(bare, 0, 0, 0) == []


def test_parts_are_the_same_as_the_whole(own_chain: bool) -> None:
    keys, one = make(own_chain), request(tokens=5 * CHUNK + 3)
    whole = keys.keys(one, 0, 0, 5)
    assert len(set(whole)) == 5
    assert all(len(key) == 32 for key in whole)
    assert make(own_chain).keys(one, 0, 3, 5) == whole[3:]
    assert keys.keys(one, 0, 1, 2) == whole[1:2]


def test_chunks_must_be_whole_hashes() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        Keys(40, 16, 1, own_chain=False)


# ---- what changes a key


def changes(tmp_path: Path) -> dict[str, Any]:
    tokens = list(range(160))
    return {
        "plain": request(tokens=tokens),
        "other first token": request(tokens=[7, *tokens[1:]]),
        "salt": request(tokens=tokens, cache_salt="a"),
        "other salt": request(tokens=tokens, cache_salt="b"),
        "lora": request(tokens=tokens, lora_request=lora("a")),
        "other lora": request(tokens=tokens, lora_request=lora("b")),
        "lora at another place": request(tokens=tokens, lora_request=lora("a", str(tmp_path))),
        "lora and salt": request(tokens=tokens, lora_request=lora("a"), cache_salt="a"),
    }


def test_everything_that_changes_kv_changes_the_keys(own_chain: bool, tmp_path: Path) -> None:
    keys = make(own_chain)
    found = {}
    for name, one in changes(tmp_path).items():
        one.request_id = name
        found[name] = keys.keys(one, 0, 4, 5)[0]
    assert len(set(found.values())) == len(found), "the last chunk of two different prefixes has one key"


def test_the_same_request_again_has_the_same_keys(own_chain: bool, tmp_path: Path) -> None:
    again = zip(changes(tmp_path).values(), changes(tmp_path).values(), strict=True)
    assert all(make(own_chain).keys(a, 0, 0, 5) == make(own_chain).keys(b, 0, 0, 5) for a, b in again)


def test_a_salt_is_not_taken_for_an_adapter(own_chain: bool) -> None:
    """Versions of vLLM that do not say which extra key is what: an adapter's name as a salt would find the adapter's blocks."""
    keys = make(own_chain)
    salted, adapted = request("s", cache_salt="a"), request("l", lora_request=lora("a"))
    assert not set(keys.keys(salted, 0, 0, 5)) & set(keys.keys(adapted, 0, 0, 5))


def test_groups_have_keys_of_their_own(own_chain: bool) -> None:
    keys, one = make(own_chain, groups=2), request()
    assert not set(keys.keys(one, 0, 0, 5)) & set(keys.keys(one, 1, 0, 5))


def test_a_new_epoch_finds_nothing_old(own_chain: bool) -> None:
    keys, one = make(own_chain), request()
    before = set(keys.keys(one, 0, 0, 5))
    keys.new_epoch()
    first = keys.keys(one, 0, 0, 5)
    keys.new_epoch()
    assert not before & set(first)
    assert not set(first) & set(keys.keys(one, 0, 0, 5))


# ---- the own chain


def test_the_chain_grows_with_the_request() -> None:
    keys, one = make(own_chain=True), request(tokens=CHUNK)
    first = keys.keys(one, 0, 0, 1)
    one.append_output_token_ids(list(range(CHUNK)))
    assert keys.keys(one, 0, 0, 2)[:1] == first
    assert keys.keys(one, 0, 0, 2) == make(own_chain=True).keys(request(tokens=[*range(CHUNK), *range(CHUNK)]), 0, 0, 2)
    keys.forget("r")
    assert not keys._chains


def test_a_request_that_loses_tokens_is_hashed_anew() -> None:
    """A session that goes on with another input drops the last tokens that were hashed, and no longer is what it was."""
    keys, session = make(own_chain=True), request(tokens=2 * CHUNK, resumable=True)
    before = keys.keys(session, 0, 0, 2)
    del session._all_token_ids[CHUNK + 5 :]
    session._all_token_ids.extend(range(1000, 1000 + CHUNK))
    after = keys.keys(session, 0, 0, 2)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert not keys._chains


@pytest.mark.parametrize("length", [16, 48])
def test_hashes_of_another_length_are_brought_to_one(length: int) -> None:
    """Keys travel packed, so one of another length would shift all those behind it."""
    bare = SimpleNamespace(request_id="r", block_hashes=[bytes([n]) * length for n in range(10)], lora_request=None)
    assert [len(key) for key in make().keys(bare, 0, 0, 5)] == [32] * 5


def test_chains_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "MAX_CHAINS", 3)
    keys = make(own_chain=True)
    for n in range(10):
        keys.keys(request(f"r{n}"), 0, 0, 1)
    assert list(keys._chains) == ["r7", "r8", "r9"]


def test_what_has_no_stable_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        hashes._canonical(("a", object()))
    forms = [None, True, 1, 1.0, "1", b"1", ("1",), (("1",),), ("1", "1"), ("11",), (), [True]]
    assert len({hashes._canonical(form) for form in forms}) == len(forms)


# ---- which of the two


@pytest.mark.parametrize(
    ("algorithm", "seed", "usable"),
    [
        ("sha256", None, FIXED),
        ("sha256_cbor", None, FIXED),
        ("sha256", "0", True),
        ("sha256", "random", True),  # vLLM takes the text itself for the seed
        ("xxhash", None, False),
        ("xxhash", "0", False),  # anybody who knows the seed can make two prefixes collide
        ("xxhash_cbor", "0", False),
    ],
)
def test_which_hashes_are_used(algorithm: str, seed: str | None, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    name, found = resolve_hashing(config)
    assert found == usable
    assert (name == "kvtierd:blake3") == (not usable)
    if usable and seed:
        assert name.endswith(f"seed={seed}")


PROGRAM = """
import sys
from kvtierd.connectors.vllm.hashes import Keys
from tests.connectors.parts import BLOCK, CHUNK, request
keys = Keys(CHUNK, BLOCK, 1, own_chain=sys.argv[1] == "own")
print("KEY", keys.keys(request(cache_salt="x"), 0, 4, 5)[0].hex())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", pytest.param("engine's", marks=pytest.mark.skipif(not FIXED, reason="not in this vLLM"))])
def test_the_same_in_every_process(kind: str) -> None:
    def run() -> str:
        out = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, check=True, timeout=100).stdout
        return next(line for line in out.splitlines() if line.startswith("KEY"))

    assert run() == run()
