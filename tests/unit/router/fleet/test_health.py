"""Ejection of a failing instance: when, for how long, and what ends it."""

import pytest

from fulcrum_router.fleet.health import (
    BASE_EJECTION_S,
    EJECT_AFTER_FAILURES,
    FIRST_PROBE_DELAY_S,
    FORGIVE_AFTER_S,
    MAX_EJECTION_S,
    MAX_PROBE_DELAY_S,
    Health,
)


def make_ejected(*, judged: bool) -> Health:
    health = Health()
    health.eject(now_s=0.0, judged=judged)
    return health


def test_consecutive_failures_are_too_many() -> None:
    health = Health()
    found = [health.record_failure(now_s=10.0) for _ in range(EJECT_AFTER_FAILURES + 1)]
    assert found == [False, False, True, True]


def test_all_connections_that_an_engine_closes_at_its_end_are_one_failure() -> None:
    health = Health()
    ends_s = [5.0, 8.0, 11.0]
    found = [
        health.record_failure(now_s=end_s + i / 1000, closed=True) for end_s in ends_s for i in range(50)
    ]
    assert (found.index(True), found.count(True), health.failed) == (100, 1, 3)


def test_a_success_resets_the_failure_count() -> None:
    health = Health()
    health.record_failure(now_s=0.0)
    health.record_failure(now_s=0.0)
    assert health.record_success() is False
    assert health.record_failure(now_s=0.0) is False


def test_an_instance_is_ejected_once() -> None:
    health = Health()
    assert [health.eject(now_s=10.0, judged=False) for _ in range(2)] == [True, False]
    assert (health.ejected, health.probe_at_s) == (True, 10.0 + FIRST_PROBE_DELAY_S)


def test_failed_probes_back_off_up_to_the_maximum_delay() -> None:
    health, waits = make_ejected(judged=False), []
    for _ in range(8):
        health.record_failed_probe(0.0)
        waits.append(health.probe_at_s)
    assert waits == [0.5, 1.0, *[MAX_PROBE_DELAY_S] * 6]


def test_an_engine_that_was_gone_is_readmitted_by_its_first_probe() -> None:
    health = make_ejected(judged=False)
    health.record_failed_probe(0.0)
    assert health.record_probe(now_s=0.1) is True
    health.eject(now_s=5.0, judged=False)
    assert health.probe_at_s == 5.0 + FIRST_PROBE_DELAY_S


def test_a_probe_that_fails_after_a_leg_has_readmitted_the_instance_does_not_count() -> None:
    """Else all further legs would be moved elsewhere: no probe for readmission would follow."""
    health = make_ejected(judged=False)
    assert health.record_success() is True
    health.record_failed_probe(1.0, unresponsive=True)
    assert (health.ejected, health.unresponsive_since_s) == (False, None)


def test_successful_probes_and_legs_do_not_shorten_an_ejection_by_judgement() -> None:
    health = make_ejected(judged=True)
    too_early = health.record_probe(now_s=BASE_EJECTION_S - 0.1), health.record_success()
    assert (too_early, health.record_probe(now_s=BASE_EJECTION_S)) == ((False, False), True)


def eject_times(health: Health, count: int, *, pause_s: float, now_s: float = 0.0) -> list[float]:
    """Durations of ejections that follow one another after `pause_s` each."""
    durations = []
    for _ in range(count):
        health.eject(now_s=now_s, judged=True)
        durations.append(health.probe_at_s - now_s)
        now_s = health.probe_at_s
        health.record_probe(now_s=now_s)
        for _ in range(int(pause_s)):
            now_s += 1.0
            health.decay(now_s)
    return durations


def test_the_ejection_time_grows_with_each_ejection_up_to_the_limit() -> None:
    durations = eject_times(Health(), 80, pause_s=1.0)
    assert durations[:3] == [BASE_EJECTION_S, 2 * BASE_EJECTION_S, 3 * BASE_EJECTION_S]
    assert set(durations[int(MAX_EJECTION_S / BASE_EJECTION_S) :]) == {MAX_EJECTION_S}


def test_ejections_are_forgotten_one_by_one() -> None:
    durations = eject_times(Health(), 5, pause_s=FORGIVE_AFTER_S + 1.0)
    assert durations == [BASE_EJECTION_S] * 5


def test_an_ejected_instance_whose_engine_restarts_returns_with_its_engine() -> None:
    health = make_ejected(judged=True)
    health.eject(now_s=1.0, judged=False, unresponsive=True)
    assert health.record_probe(now_s=1.5) is True


def test_errors_are_forgotten_with_successes_and_with_time() -> None:
    health = Health()
    for _ in range(20):
        health.record_error()
    assert 0.8 < health.error_share < 1.0
    for _ in range(60):
        health.record_success()
    by_success = health.error_share
    health.record_error()
    for second in range(20):
        health.decay(float(second))
    assert (by_success, health.error_share) == (0.0, 0.0)


@pytest.mark.parametrize("pause_s", [0.001, 0.02, 0.09])
def test_an_engine_that_closes_every_connection_is_ejected_however_many_it_gets(pause_s: float) -> None:
    """It lives, reads requests and closes: an engine that ends closes no connections for seconds."""
    health = Health()
    times_s = [number * pause_s for number in range(int(5.0 / pause_s))]
    assert any(health.record_failure(now_s=now_s, closed=True) for now_s in times_s)


def test_an_engine_with_so_many_connections_that_its_end_takes_a_second_has_failed_once() -> None:
    health = Health()
    for number in range(1_000):
        health.record_failure(now_s=number / 1_001, closed=True)
    assert health.failures == 1
