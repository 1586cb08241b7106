"""Which ends of engines count as deaths, and how long."""

from fulcrum_router.policy.faults.engine_deaths import WINDOW_S, EngineDeaths


def test_a_death_that_only_a_probe_has_found_counts_for_ten_seconds() -> None:
    deaths = EngineDeaths()
    deaths.record_found("d1", since_s=4.0, now_s=5.0)
    assert (deaths.count(5.0 + WINDOW_S), deaths.count(5.1 + WINDOW_S)) == (1, 0)


def test_a_death_that_legs_have_shown_is_not_found_again() -> None:
    deaths = EngineDeaths()
    deaths.record("d1", 4.5)
    deaths.record_found("d1", since_s=4.0, now_s=5.0)
    assert deaths.count(5.0) == 1


def test_a_death_that_was_found_is_not_found_again_until_the_engine_has_answered() -> None:
    deaths = EngineDeaths()
    for now_s in (5.0, 6.0):
        deaths.record_found("d1", since_s=4.0, now_s=now_s)
    assert deaths.count(6.0) == 1
    deaths.record_found("d1", since_s=7.0, now_s=8.0)
    assert deaths.count(8.0) == 2
