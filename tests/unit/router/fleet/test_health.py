"""When an instance is left out, and when it is asked again."""

from fulcrum_router.fleet.health import EJECT_AFTER, FIRST_PROBE_S, LAST_PROBE_S, Health


def test_failures_in_a_row_eject_and_say_so_once() -> None:
    health = Health()
    assert [health.failed(10.0) for _ in range(EJECT_AFTER + 1)] == [False, False, True, False]
    assert (health.ejected, health.probe_at_s) == (True, 10.0 + FIRST_PROBE_S)


def test_a_refused_connection_ejects_at_once() -> None:
    assert Health().failed(0.0, at_once=True)


def test_an_answer_in_between_starts_the_count_anew() -> None:
    health = Health()
    health.failed(0.0)
    health.failed(0.0)
    assert health.succeeded() is False
    assert health.failed(0.0) is False


def test_probes_of_a_dead_instance_become_rarer_up_to_a_bound() -> None:
    health = Health()
    health.failed(0.0, at_once=True)
    waits = []
    for _ in range(8):
        health.probe_failed(0.0)
        waits.append(health.probe_at_s)
    assert waits == [0.5, 1.0, *[LAST_PROBE_S] * 6]


def test_an_answered_probe_brings_it_back_and_forgets() -> None:
    health = Health()
    health.failed(0.0, at_once=True)
    health.probe_failed(0.0)
    assert health.succeeded() is True
    health.failed(5.0, at_once=True)
    assert (health.failures, health.probe_at_s) == (1, 5.0 + FIRST_PROBE_S)
