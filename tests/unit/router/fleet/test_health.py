"""Ejection of a failing instance, and the delays between probes."""

from fulcrum_router.fleet.health import EJECT_AFTER_FAILURES, FIRST_PROBE_DELAY_S, MAX_PROBE_DELAY_S, Health


def test_consecutive_failures_eject_the_instance_once() -> None:
    health = Health()
    assert [health.record_failure(10.0) for _ in range(EJECT_AFTER_FAILURES + 1)] == [
        False,
        False,
        True,
        False,
    ]
    assert (health.ejected, health.probe_at_s) == (True, 10.0 + FIRST_PROBE_DELAY_S)


def test_eject_now_ejects_at_the_first_failure() -> None:
    assert Health().record_failure(0.0, eject_now=True)


def test_a_success_resets_the_failure_count() -> None:
    health = Health()
    health.record_failure(0.0)
    health.record_failure(0.0)
    assert health.record_success() is False
    assert health.record_failure(0.0) is False


def test_failed_probes_back_off_up_to_the_maximum_delay() -> None:
    health = Health()
    health.record_failure(0.0, eject_now=True)
    waits = []
    for _ in range(8):
        health.record_failed_probe(0.0)
        waits.append(health.probe_at_s)
    assert waits == [0.5, 1.0, *[MAX_PROBE_DELAY_S] * 6]


def test_a_successful_probe_readmits_the_instance_and_resets_the_backoff() -> None:
    health = Health()
    health.record_failure(0.0, eject_now=True)
    health.record_failed_probe(0.0)
    assert health.record_success() is True
    health.record_failure(5.0, eject_now=True)
    assert (health.failures, health.probe_at_s) == (1, 5.0 + FIRST_PROBE_DELAY_S)
