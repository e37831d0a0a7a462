"""Goal: the circuit breaker opens, waits and closes as its diagram says. Method: the clock and the jitter are numbers here;
a Hypothesis machine checks the invariants under any order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtierd.client.breaker import BreakerState, CircuitBreaker


def breaker(**options: float) -> CircuitBreaker:
    return CircuitBreaker(**({"threshold": 3, "backoff_min_s": 1.0, "backoff_max_s": 4.0, "jitter": lambda: 1.0} | options))  # type: ignore[arg-type]


def test_only_failures_in_a_row_open_it() -> None:
    b = breaker()
    for _ in range(5):
        b.failure(0)
        b.failure(0)
        b.success()
    assert b.admits
    for _ in range(3):
        b.failure(10)
    assert not b.admits
    assert b.retry_at == 11


def test_a_trial_is_given_once_and_only_when_due() -> None:
    b = breaker()
    b.trip(0)
    assert not b.begin_trial(0.99)
    assert b.begin_trial(1.0)
    assert b.state is BreakerState.HALF_OPEN
    assert not b.begin_trial(100)
    assert not b.admits
    b.success()
    assert b.admits


def test_the_back_off_doubles_up_to_its_maximum_and_a_success_resets_it() -> None:
    b = breaker()
    now, waits = 0.0, []
    b.trip(now)
    for _ in range(5):
        assert b.retry_at is not None
        waits.append(b.retry_at - now)
        now = b.retry_at
        assert b.begin_trial(now)
        b.failure(now)
    assert waits == [1, 2, 4, 4, 4]
    assert b.retry_at is not None
    assert b.begin_trial(b.retry_at)
    b.success()
    b.trip(100)
    assert b.retry_at == 101


def test_jitter_halves_the_wait_at_most() -> None:
    b = breaker(jitter=lambda: 0.0)  # type: ignore[arg-type]
    b.trip(0)
    assert b.retry_at == 0.5


def test_late_failures_do_not_prolong_an_open_circuit() -> None:
    b = breaker()
    b.trip(0)
    b.failure(0.5)
    b.trip(0.9)
    assert b.retry_at == 1


@pytest.mark.parametrize("options", [{"threshold": 0}, {"backoff_min_s": 0.0}, {"backoff_min_s": 5.0}])
def test_senseless_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        breaker(**options)


class BreakerMachine(RuleBasedStateMachine):
    """Any order of events: calls go only while it is closed, and an open circuit always gets its trial in time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = breaker()

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def success(self) -> None:
        self.breaker.success()
        assert self.breaker.admits

    @rule()
    def failure(self) -> None:
        self.breaker.failure(self.now)

    @rule()
    def trip(self) -> None:
        self.breaker.trip(self.now)
        assert not self.breaker.admits

    @rule()
    def trial(self) -> None:
        due = self.breaker.retry_at
        assert self.breaker.begin_trial(self.now) is (due is not None and self.now >= due)

    @invariant()
    def an_open_circuit_is_tried_within_the_longest_back_off(self) -> None:
        assert (self.breaker.retry_at is None) == (self.breaker.state is not BreakerState.OPEN)
        if self.breaker.retry_at is not None:
            assert self.breaker.retry_at <= self.now + 4.0


TestBreakerMachine = BreakerMachine.TestCase
