"""Goal: attempts that fail one after the other pause, for longer and longer; one that succeeds ends that.

Method: the clock is given.
"""

from __future__ import annotations

from kvtierd.connectors.vllm.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_end_with_a_success() -> None:
    pauses, now = Backoff(3, 1.0, 5.0), 0.0
    for _ in range(2):
        pauses.failed(now, now)
    assert not pauses.pausing(now)
    lengths = []
    for _ in range(5):
        pauses.failed(now, now)
        begun = now
        while pauses.pausing(now):
            now += 0.5
        lengths.append(now - begun)
    assert lengths == [1.0, 2.0, 4.0, 5.0, 5.0]
    pauses.succeeded()
    for _ in range(2):
        pauses.failed(now, now)
    assert not pauses.pausing(now)
    pauses.failed(now, now)
    assert pauses.pausing(now + 0.9)
    assert not pauses.pausing(now + 1.0)


def test_many_that_fail_together_count_as_one() -> None:
    """All loads that were under way when something broke."""
    pauses = Backoff(1, 1.0, 100.0)
    for n in range(10):
        pauses.failed(5.0, 6.0 + n / 100)
    assert not pauses.pausing(7.0)
    pauses.failed(7.0, 7.5)
    assert pauses.pausing(9.4)
    assert not pauses.pausing(9.5)


def test_a_success_forgets_when_the_pause_began() -> None:
    pauses = Backoff(1, 1.0, 100.0)
    pauses.failed(5.0, 6.0)
    pauses.succeeded()
    assert not pauses.pausing(6.0)
    pauses.failed(5.5, 6.5)
    assert pauses.pausing(7.0)
