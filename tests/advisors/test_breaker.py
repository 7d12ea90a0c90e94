from __future__ import annotations

import pytest

from lore_torchrl.advisors.breaker import CircuitBreaker
from lore_torchrl.advisors.errors import CircuitOpenError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, reset_s=10.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.admit()
        breaker.failure()


@pytest.mark.parametrize(
    ("keywords", "value"),
    [({"failures": 0}, "0"), ({"reset_s": 0.0}, "0.0"), ({"reset_s": float("inf")}, "inf")],
)
def test_impossible_values_fail_at_construction(keywords, value):
    with pytest.raises(ValueError, match=value):
        CircuitBreaker(**keywords)


def test_failures_in_a_row_open_it_and_a_success_between_starts_anew(breaker):
    fail(breaker, 2)
    breaker.admit()
    breaker.success()
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker, 1)
    assert breaker.state == "open"
    with pytest.raises(CircuitOpenError, match=r"3 failures.*10\.0 s"):
        breaker.admit()


def test_half_open_lets_one_probe_through(breaker, clock):
    fail(breaker, 3)
    clock.now = 9.9
    with pytest.raises(CircuitOpenError):
        breaker.admit()
    clock.now = 10.0
    assert breaker.state == "half_open"
    breaker.admit()
    with pytest.raises(CircuitOpenError, match="tried"):
        breaker.admit()
    breaker.success()
    assert breaker.state == "closed"
    breaker.admit()


def test_a_failed_probe_opens_it_again_for_the_full_time(breaker, clock):
    fail(breaker, 3)
    clock.now = 10.0
    breaker.admit()
    breaker.failure()
    clock.now = 19.9
    assert breaker.state == "open"
    clock.now = 20.0
    assert breaker.state == "half_open"


def test_a_cancelled_probe_makes_place_for_the_next(breaker, clock):
    fail(breaker, 3)
    clock.now = 10.0
    breaker.admit()
    breaker.undecided()
    breaker.admit()
    breaker.success()
    assert breaker.state == "closed"


def test_late_failures_do_not_extend_the_wait(breaker, clock):
    for _ in range(5):
        breaker.admit()
    for _ in range(3):
        breaker.failure()
    clock.now = 8.0
    breaker.failure()
    breaker.failure()
    clock.now = 10.0
    assert breaker.state == "half_open"
