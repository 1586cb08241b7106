"""How many requests an engine decodes together, found from its counts."""

from typing import NamedTuple

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import InstanceRecord
from fulcrum_router.policy.predictions.batch_limit import MEMORY_S, BatchLimit, BatchLimits
from tests.unit.router.builders import instance


class Probe(NamedTuple):
    """What an engine reports at a time."""

    at_s: float
    running: int | None
    waiting: int
    prompt_s: float = 0.0
    """Predicted duration of a prompt that arrived at 0 s and is in flight."""
    kv_usage: float | None = None
    itl_s: float | None = 0.02


def probed(probe: Probe, name: str = "d") -> InstanceRecord:
    """A decode instance as its engine reported itself."""
    record = instance(name, queued_s=probe.prompt_s, prefilling=9 if probe.prompt_s else 0)
    record.engine_read_at_s, record.kv_usage, record.itl_s = probe.at_s, probe.kv_usage, probe.itl_s
    record.engine_running, record.engine_waiting = probe.running, probe.waiting
    return record


def observe(*probes: Probe, limit: BatchLimit | None = None) -> int | None:
    limit = limit or BatchLimit()
    for probe in probes:
        limit = limit.observe([probed(probe)], now_s=probe.at_s)
    return limit.max_seqs


def test_a_batch_is_full_if_as_many_requests_run_in_three_probes_while_others_wait() -> None:
    assert observe(Probe(1, 64, 6), Probe(2, 64, 9), Probe(3, 64, 1)) == 64


@pytest.mark.parametrize(
    "probes",
    [
        pytest.param([Probe(1, 64, 6), Probe(2, 64, 6)], id="two probes"),
        pytest.param([Probe(1, 64, 6), Probe(1, 64, 6), Probe(1, 64, 6)], id="one probe, read three times"),
        pytest.param([Probe(1, 64, 1), Probe(2, 65, 1), Probe(3, 64, 1)], id="they wait for the next step"),
        pytest.param([Probe(1, 64, 1), Probe(2, 64, 0), Probe(3, 64, 1)], id="none waits in between"),
        pytest.param([Probe(t, 9, 1) for t in (1, 2, 3)], id="a small batch, by chance"),
        pytest.param([Probe(t, 64, 1, prompt_s=1.0) for t in (1, 2, 3)], id="they wait for a prompt"),
        pytest.param([Probe(t, 64, 1, kv_usage=0.95) for t in (1, 2, 3)], id="they wait for KV blocks"),
        pytest.param([Probe(t, None, 1) for t in (1, 2, 3)], id="an engine without a count"),
        pytest.param([Probe(t, 64, 1, itl_s=None) for t in (1, 2, 3)], id="an engine that hangs"),
        pytest.param([Probe(t, 10**15, 1) for t in (1, 2, 3)], id="an absurd number"),
    ],
)
def test_other_requests_that_wait_say_nothing_of_the_limit(probes: list[Probe]) -> None:
    assert observe(*probes) is None


def test_a_limit_is_forgotten_when_an_engine_runs_more_requests() -> None:
    chance = [Probe(t, 36, 1) for t in (1, 2, 3)]
    assert (observe(*chance), observe(*chance, Probe(4, 160, 0))) == (36, None)


def test_a_prompt_that_must_be_computed_by_now_hides_no_full_batch() -> None:
    assert observe(*(Probe(t, 64, 6, prompt_s=0.05) for t in (2, 3, 4))) == 64


def test_an_engine_that_makes_no_tokens_hides_no_limit() -> None:
    shown = [Probe(t, 64, 6) for t in (1, 2, 3)]
    assert observe(*shown, Probe(4, 80, 0, itl_s=None)) == 64


def test_a_batch_is_not_full_while_another_instance_runs_more() -> None:
    limit = BatchLimit()
    for at_s in (1, 2, 3):
        instances = probed(Probe(at_s, 36, 1)), probed(Probe(at_s, 37, 0), "d2")
        limit = limit.observe(instances, now_s=at_s)
    assert limit.max_seqs is None


def test_an_instance_with_an_absurd_number_hides_no_full_batch() -> None:
    limit = BatchLimit()
    for at_s in (1, 2, 3):
        instances = probed(Probe(at_s, 64, 1)), probed(Probe(at_s, 10**9, 0), "d2")
        limit = limit.observe(instances, now_s=at_s)
    assert limit.max_seqs == 64


def test_a_limit_is_forgotten_when_no_full_batch_has_shown_it_for_some_time() -> None:
    shown = [Probe(t, 64, 6) for t in (1, 2, 3)]
    after_s = 3 + MEMORY_S
    assert observe(*shown, Probe(after_s, 40, 0)) == 64
    assert observe(*shown, Probe(after_s + 1, 40, 0)) is None
    lower = [Probe(after_s + 1 + t, 40, 6) for t in range(3)]
    assert observe(*shown, *lower) == 40


def test_a_missed_probe_ends_the_row_of_equal_ones() -> None:
    full = [Probe(t, 64, 1) for t in (1, 2, 3)]
    assert observe(*full[:2], Probe(2, None, 1, itl_s=None), full[2]) is None


def test_the_highest_number_counts() -> None:
    limit = BatchLimit(50, 1.0)
    assert observe(*(Probe(t, 40, 6) for t in (1, 2, 3)), limit=limit) == 50
    assert observe(*(Probe(t, 64, 6) for t in (1, 2, 3)), limit=limit) == 64


def test_the_limit_counts_for_all_instances_of_the_pool() -> None:
    limits, idle, prefill = BatchLimits(), instance("d2"), instance("p1")
    for at_s in (1, 2, 3):
        full = probed(Probe(at_s, 64, 1))
        assert full.max_seqs is None
        limits.observe([full, idle, prefill], now_s=at_s)
    assert [i.max_seqs for i in (full, idle, prefill)] == [64, 64, 64]
    flipped = instance("p2", role=Role.DECODE)
    limits.observe([flipped], now_s=4)
    assert flipped.max_seqs == 64


@pytest.mark.parametrize(("running", "max_seqs"), [(10, 64), (90, 90)])
def test_a_pool_without_a_limit_has_the_smallest_one_unless_it_runs_more(running: int, max_seqs: int) -> None:
    limits, records = BatchLimits(), []
    for at_s in (1, 2, 3):
        records = [probed(Probe(at_s, batch, 1 if batch in (64, 128) else 0)) for batch in (64, 128, running)]
        for record, pool in zip(records, ("small", "large", "unknown"), strict=True):
            record.pool = pool
        limits.observe(records, now_s=at_s)
    assert [record.max_seqs for record in records] == [64, 128, max_seqs]
    assert [record.max_seqs_shown for record in records] == [64, 128, None], "the autoscaler gets no guess"


def test_prefill_instances_and_those_that_do_not_serve_show_no_limit() -> None:
    limits, records = BatchLimits(), []
    for at_s in (1, 2, 3):
        records = [probed(Probe(at_s, 64, 1), "p1"), probed(Probe(at_s, 64, 1), "d1")]
        records[1].serving = False
        limits.observe(records, now_s=at_s)
    assert [record.max_seqs for record in records] == [None, None]
