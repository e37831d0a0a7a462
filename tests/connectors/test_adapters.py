"""Goal: KV that was computed with one adapter is never found for another, however the other came in its place, and no look at an
adapter's files holds the engine's thread up.

Method: requests of vLLM's, an adapter's folder whose content changes, and file systems that hang or fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from vllm.lora.request import LoRARequest

from kvtierd.connectors.vllm import adapters
from kvtierd.connectors.vllm.hashes import Keys
from tests.connectors.parts import BLOCK, CHUNK, request

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
NUMBERS = iter(range(1_000_000))


class Place:
    """An adapter's folder, and requests for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.put(b"1")

    def put(self, content: bytes) -> None:
        """Other weights."""
        (self.folder / "adapter_model.safetensors").write_bytes(content * 1000)

    def request(self, *, number: int = 1, reload: bool = False, path: str = "") -> Any:
        lora = LoRARequest("a", number, path or str(self.folder), load_inplace=reload)
        return request(f"r{next(NUMBERS)}", lora_request=lora)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(adapters, "WAIT_S", 20.0)  # for slow machines
    return Place(tmp_path)


@pytest.fixture
def keys() -> Iterator[Keys]:
    made = Keys(CHUNK, BLOCK, 1, own_chain=False)
    yield made
    made.close()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(adapters.log, "warning", lambda text, *values: found.append(text % values))
    return found


def of(keys: Keys, one: Any) -> list[bytes]:
    assert keys.count(one) == 5
    return keys.keys(one, 0, 0, 5)


def drained(keys: Keys) -> None:
    """Wait until all files have been looked at."""
    ended = threading.Event()
    assert keys._adapters._thread is not None
    assert keys._adapters._thread.submit(ended.set)
    assert ended.wait(20)


def test_the_same_content_has_the_same_keys(keys: Keys, place: Place) -> None:
    first = of(keys, place.request())
    assert of(keys, place.request()) == of(keys, place.request(number=7)) == of(keys, place.request(reload=True)) == first
    again = Keys(CHUNK, BLOCK, 1, own_chain=False)
    assert of(again, place.request()) == first
    again.close()


def test_an_adapter_that_is_loaded_in_place(keys: Keys, place: Place) -> None:
    first = of(keys, place.request(reload=True))
    place.put(b"2")
    second = of(keys, place.request(reload=True))
    assert not set(first) & set(second)
    assert of(keys, place.request()) == second, "from here on the engine has the new one"
    place.put(b"1")
    assert of(keys, place.request(reload=True)) == first


def test_an_adapter_that_is_loaded_again_under_another_number(keys: Keys, place: Place) -> None:
    first = of(keys, place.request(number=1))
    place.put(b"2")
    assert not set(first) & set(of(keys, place.request(number=2)))


@pytest.mark.parametrize("reload", [False, True])
def test_a_request_that_saw_two_adapters(keys: Keys, place: Place, reload: bool) -> None:
    """Its KV belongs to neither of them."""
    running = place.request(reload=reload)
    first = of(keys, running)
    place.put(b"2")
    second = of(keys, place.request(reload=True))
    mixed = keys.keys(running, 0, 3, 5)
    assert not set(mixed) & {*first, *second}


def test_a_request_in_flight_alone(keys: Keys, place: Place) -> None:
    running = place.request(reload=True)
    before = keys.keys(running, 0, 0, 3)
    place.put(b"2")
    after = keys.keys(running, 0, 0, 5)
    assert not set(before) & set(after)
    assert not set(after) & set(of(keys, place.request(reload=True)))


def test_files_that_change_while_the_engine_goes_on_with_the_old_ones(keys: Keys, place: Place, warned: list[str]) -> None:
    old = of(keys, place.request())
    drained(keys)  # a look in the middle of the writing would find other content, and tell of that too
    place.put(b"2")
    keys.count(place.request())  # nobody has told: this look finds it
    drained(keys)
    assert keys.count(place.request()) == 0
    drained(keys)
    assert len(warned) == 1
    assert not set(old) & set(of(keys, place.request(reload=True)))
    drained(keys)
    assert keys.count(place.request()) == 5


def test_files_that_were_only_touched(keys: Keys, place: Place, warned: list[str]) -> None:
    old = of(keys, place.request())
    drained(keys)  # a look in the middle of the writing would find other content
    place.put(b"1")
    keys.count(place.request())
    drained(keys)
    assert of(keys, place.request()) == old
    assert not warned


def test_after_a_reset_everything_is_looked_at_anew(keys: Keys, place: Place) -> None:
    one = place.request()
    of(keys, one)
    place.put(b"2")
    keys.new_epoch()
    assert keys.count(one) == keys.count(place.request()) == 5


def test_a_file_system_that_hangs(place: Place, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request waits a moment, the others not at all. Each goes without a cache until its adapter is known."""
    go_on = threading.Event()
    right = adapters.stamp
    monkeypatch.setattr(adapters, "stamp", lambda path: go_on.wait(20) and right(path))
    monkeypatch.setattr(adapters, "WAIT_S", 0.01)
    requests = [place.request(number=1 + n % 2, reload=n % 3 == 0) for n in range(200)]
    started_s = time.monotonic()
    assert [keys.count(one) for one in requests] == [0] * 200
    assert time.monotonic() - started_s < 1.0
    go_on.set()
    drained(keys)
    assert [keys.count(one) for one in requests] == [5] * 200
    monkeypatch.setattr(adapters, "WAIT_S", 20.0)
    assert len({tuple(of(keys, one)) for one in requests}) == 1


def test_more_looks_than_may_wait(place: Place, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    of(keys, place.request())
    monkeypatch.setattr(keys._adapters._thread, "submit", lambda task: False)
    assert keys.count(place.request()) == 5
    assert keys.count(place.request(reload=True)) == 0
    assert keys.count(place.request(number=9)) == 0


def test_nothing_grows_for_ever(place: Place, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 3)
    monkeypatch.setattr(adapters, "MAX_REQUESTS", 3)
    for number in range(1, 10):
        keys.count(place.request(number=number))
    drained(keys)
    assert len(keys._adapters._known) == 3
    assert len(keys._adapters._looks) == 3
    for name in list(keys._adapters._looks):
        keys.forget(name)
    assert not keys._adapters._looks


def test_adapters_whose_content_is_not_known_go_by_their_path(place: Place, keys: Keys, warned: list[str]) -> None:
    nowhere = of(keys, place.request(path="/nowhere"))
    assert of(keys, place.request(path="/nowhere")) == nowhere
    assert not set(nowhere) & set(of(keys, place.request(path="/elsewhere")))
    assert len(warned) == 2


@pytest.mark.parametrize("name", ["stamp", "name_weights"])
def test_files_that_cannot_be_read(name: str, place: Place, keys: Keys, warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> object:
        raise PermissionError(path)

    monkeypatch.setattr(adapters, name, broken)
    assert len(of(keys, place.request())) == 5


def test_requests_without_adapters_look_at_nothing(keys: Keys) -> None:
    of(keys, request())
    assert keys._adapters._thread is None
