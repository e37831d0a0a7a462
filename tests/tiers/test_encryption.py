"""Goal: with a key nothing of a payload is on disk, only that key brings it back, and whatever was changed is a miss.

Method: published test vectors; files searched for payloads; every part of a slot changed; starts with each key after each other.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.config import load_config
from kvtierd.errors import ConfigError, StartupError
from kvtierd.model import PAGE_BYTES, slot_id
from kvtierd.tiers import encryption
from kvtierd.tiers.base import RealmInfo, Recovered, Result
from kvtierd.tiers.encryption import SlotCipher, read_key
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import sealed_page
from tests.tiers.conformance import assert_held, block, key_of, payload, realm_of, slot_bytes_for
from tests.tiers.nvme_tools import MIB, config_for, flip, open_store, segment_path

SIZE = 5000
REALM = realm_of(SIZE)
SLOT = slot_bytes_for(SIZE)
KEY = bytes(range(32)).hex()


def key_file(folder: Path, text: str = KEY, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def opened(tmp_path: Path, text: str | None = KEY, **more: Any) -> tuple[NvmeStore, Recovered]:
    key = {"encryption_key_file": key_file(tmp_path, text)} if text is not None else {}
    return open_store(config_for(tmp_path / "d", **key, **more))


def stored(tmp_path: Path, realm: RealmInfo = REALM, count: int = 2) -> NvmeStore:
    store, _ = opened(tmp_path)
    store.register_realm(realm)
    for shard, size in enumerate(realm.namespace.shard_bytes):
        store.add_extent(shard + 1, slot_bytes_for(size), count)
    slots = range(1, len(realm.namespace.shard_bytes) + 1)
    blocks = [block(realm, n, n + 1, *(slot_id(extent, n) for extent in slots)) for n in range(count)]
    assert store.write(blocks) == [Result.OK] * count
    return store


@pytest.mark.parametrize(
    "key, bound, wanted",
    [
        (1, b"", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"),
        (3, b"c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"),
    ],
)
@pytest.mark.parametrize("most", [encryption.MAX_ONE_CALL_BYTES, 0])
def test_the_published_vectors(key: int, bound: bytes, wanted: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "MAX_ONE_CALL_BYTES", most)
    nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    monkeypatch.setattr(encryption.secrets, "token_bytes", lambda size: nonce[:size])
    into, text = memoryview(bytearray(28)), memoryview(b"XAES-256-GCM")
    cipher = SlotCipher(bytes([key]) * 32)
    seal = cipher.encrypt(text, bound, into)
    assert bytes(into).hex() == wanted
    assert cipher.decrypt(into[:12], bound, seal) and into[:12] == text


@pytest.mark.parametrize("sizes", [(1,), (4096,), (SIZE, 4096, 1), (9 * MIB,)])
def test_payloads_are_on_disk_in_no_form_that_can_be_read(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    realm = realm_of(*sizes)
    store = stored(tmp_path, realm)
    slots = range(1, len(sizes) + 1)
    for n in range(2):
        assert_held(store, realm, n, n + 1, *(slot_id(extent, n) for extent in slots))
    store.close()
    for shard, size in enumerate(sizes):
        raw = Path(segment_path(tmp_path / "d", shard + 1)).read_bytes()
        assert all(payload((n, shard), size)[:64] not in raw for n in range(2) if size >= 64)
        end = PAGE_BYTES + size
        assert not any(raw[end : slot_bytes_for(size)]), "nor what lies beside the payload in memory"
    store, recovered = opened(tmp_path)
    assert store.encrypted and len(list(recovered.blocks)) == 2
    for n in range(2):
        assert_held(store, realm, n, n + 1, *(slot_id(extent, n) for extent in slots))
    store.close()


def test_the_same_block_in_the_same_place_is_never_encrypted_alike(tmp_path: Path) -> None:
    store = stored(tmp_path, count=1)
    path = segment_path(tmp_path / "d", 1)
    seen = {Path(path).read_bytes()[PAGE_BYTES : PAGE_BYTES + SIZE]}
    for _ in range(3):
        assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
        seen.add(Path(path).read_bytes()[PAGE_BYTES : PAGE_BYTES + SIZE])
    assert len(seen) == 4
    store.close()


@pytest.mark.parametrize("at", [8, 12, 24, 32, 40, 100, 130, 150, 160, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + SIZE - 1])
def test_whatever_is_changed_is_a_miss(tmp_path: Path, at: int) -> None:
    store = stored(tmp_path)
    flip(segment_path(tmp_path / "d", 1), at)
    wanted = block(REALM, 0, 1, slot_id(1, 0), filled=False)
    assert store.read([wanted]) == [Result.CORRUPT]
    assert payload((0, 0), SIZE)[:64] not in bytes(wanted.buffers[0])
    assert_held(store, REALM, 1, 2, slot_id(1, 1))
    store.close()


@pytest.mark.parametrize("part", ["payload", "payload and seal"])
def test_one_block_does_not_pass_for_another(tmp_path: Path, part: str) -> None:
    """The key holder's own bytes in another place, with a checksum of the page that fits."""
    store = stored(tmp_path)
    path = Path(segment_path(tmp_path / "d", 1))
    raw = bytearray(path.read_bytes())
    raw[PAGE_BYTES:SLOT] = raw[SLOT + PAGE_BYTES : 2 * SLOT]
    if part == "payload and seal":
        prefix = raw[:128]
        raw[:PAGE_BYTES] = sealed_page(bytes(prefix), bytes(raw[SLOT + 128 : SLOT + 168]))
    path.write_bytes(raw)
    wanted = block(REALM, 0, 1, slot_id(1, 0), filled=False)
    assert store.read([wanted]) == [Result.CORRUPT]
    assert not any(bytes(wanted.buffers[0])), "nothing of it stays in the reader's memory"
    store.close()


@pytest.mark.parametrize(
    "first, then, words",
    [
        (None, KEY, "has blocks that are not encrypted, and nvme.encryption_key_* is set"),
        (KEY, None, "has blocks that are encrypted, and no nvme.encryption_key_* is set"),
        (KEY, KEY[::-1], "encrypted with another key than the one"),
    ],
)
def test_another_key_starts_with_an_empty_cache(
    tmp_path: Path, first: str | None, then: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = opened(tmp_path, first)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 2)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    store, recovered = opened(tmp_path, then)
    assert words in caplog.text
    assert not list(recovered.blocks) and recovered.realms == [REALM]
    assert not list((tmp_path / "d").glob("segment-*")), "what can be read by others does not stay"
    assert store.encrypted == (then is not None)
    store.add_extent(recovered.next_extent_id, SLOT, 2)
    place = slot_id(recovered.next_extent_id, 0)
    assert store.write([block(REALM, 7, recovered.next_generation, place)]) == [Result.OK]
    store.close()
    caplog.clear()
    store, recovered = opened(tmp_path, then)
    assert [key for _, key, *_ in recovered.blocks] == [key_of(7)] and "deleted" not in caplog.text
    store.close()


@pytest.mark.parametrize("text", [KEY, KEY.upper() + "\n", f" {base64.b64encode(bytes.fromhex(KEY)).decode()}\n"])
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_key_is_read(tmp_path: Path, text: str, mode: int) -> None:
    path = key_file(tmp_path, text, mode)
    assert read_key(config_for(tmp_path, encryption_key_file=path)) == bytes.fromhex(KEY)
    assert read_key(config_for(tmp_path, encryption_key_command=f"cat '{path}'")) == bytes.fromhex(KEY)


@pytest.mark.parametrize(
    "text, mode, words",
    [
        (KEY[:62], 0o600, "is no key: it is to be 64 hex digits, or 32 bytes in base64"),
        (KEY + "ab", 0o600, "is no key"),
        ("z" * 64, 0o600, "is no key"),
        ("", 0o600, "is no key"),
        ("0" * 64, 0o600, "one byte again and again"),
        (KEY, 0o644, "has permissions 0644: others have access to it; chmod it to 0600"),
        (KEY, 0o620, "has permissions 0620"),
    ],
)
def test_a_bad_key_file_is_refused_without_telling_it(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(StartupError) as refused:
        NvmeStore.open(config_for(tmp_path / "d", encryption_key_file=key_file(tmp_path, text, mode)))
    assert words in str(refused.value) and str(tmp_path / "key") in str(refused.value)
    assert not text or text not in str(refused.value)
    assert not (tmp_path / "d").exists(), "nothing was done"


@pytest.mark.parametrize(
    "command, words",
    [
        ("false", "ended with status 1; run it by hand"),
        ("/no/such/program", "cannot be run"),
        ("echo 'unclosed", "cannot be run"),
        ("echo secret", "the output of nvme.encryption_key_command is no key"),
        ("yes secret", "the output of nvme.encryption_key_command is no key"),
        (" ", "names no program"),
        ("sh -c 'echo secret; exec 1>&-; exec sleep 100'", "took longer than 1 s; see what it waits for"),
        ("sh -c 'sleep 100; echo secret'", "took longer than 1 s; see what it waits for"),
        ("sh -c 'kill -9 $$'", "ended with status -9"),
    ],
)
def test_a_command_that_gives_no_key_is_refused(tmp_path: Path, command: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in command:
        monkeypatch.setattr(encryption, "KEY_COMMAND_S", 1.0)
    with pytest.raises(StartupError) as refused:
        read_key(config_for(tmp_path, encryption_key_command=command))
    assert words in str(refused.value) and "secret" not in str(refused.value)


def test_a_key_without_what_encrypts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(StartupError, match=r"install kvtierd\[encryption\]"):
        NvmeStore.open(config_for(tmp_path / "d", encryption_key_file=key_file(tmp_path)))
    assert not (tmp_path / "d").exists(), "nothing was done"


def test_one_source_of_the_key_is_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are both set; leave one of them out"):
        load_config(flags={"nvme.encryption_key_file": "/k", "nvme.encryption_key_command": "cat /k"}, env={})
