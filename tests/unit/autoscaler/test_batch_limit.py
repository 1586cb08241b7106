"""How many requests an engine decodes together, found from its counts."""

import math
from typing import Any

import pytest

from fulcrum_autoscaler.policy.batch_limit import BatchLimit
from fulcrum_core.router_state import InstanceState
from tests.unit.autoscaler.builders import decode


def probe(at_s: float, running: int, waiting: int, **fields: Any) -> InstanceState:
    """A decode instance as its engine reported itself at a time."""
    return decode(
        "d", engine_requests=running + waiting, engine_waiting=waiting, engine_read_at_s=at_s, **fields
    )


def observe(*probes: InstanceState, limit: BatchLimit | None = None) -> float:
    limit = limit or BatchLimit()
    for state in probes:
        limit = limit.observe([state])
    return limit.requests


def test_a_batch_is_full_if_as_many_requests_run_in_three_probes_while_others_wait() -> None:
    assert observe(probe(1, 64, 6), probe(2, 64, 9), probe(3, 64, 1)) == 64


@pytest.mark.parametrize(
    "probes",
    [
        pytest.param([probe(1, 64, 6), probe(2, 64, 6)], id="two probes"),
        pytest.param([probe(1, 64, 6), probe(1, 64, 6), probe(1, 64, 6)], id="one probe, read three times"),
        pytest.param([probe(1, 64, 1), probe(2, 65, 1), probe(3, 64, 1)], id="they wait for the next step"),
        pytest.param([probe(1, 64, 1), probe(2, 64, 0), probe(3, 64, 1)], id="none waits in between"),
        pytest.param([probe(t, 9, 1) for t in (1, 2, 3)], id="a small batch, by chance"),
        pytest.param([probe(t, 64, 1, prefill_tokens=9) for t in (1, 2, 3)], id="they wait for a prompt"),
        pytest.param([probe(t, 64, 1, kv_usage=0.95) for t in (1, 2, 3)], id="they wait for KV blocks"),
        pytest.param([decode("d", engine_waiting=1)] * 3, id="an engine without a count"),
    ],
)
def test_other_requests_that_wait_say_nothing_of_the_limit(probes: list[InstanceState]) -> None:
    assert observe(*probes) == math.inf


def test_a_limit_is_forgotten_when_an_engine_runs_more_requests() -> None:
    chance = [probe(t, 36, 1) for t in (1, 2, 3)]
    assert (observe(*chance), observe(*chance, probe(4, 160, 0))) == (36, math.inf)


def test_a_batch_is_not_full_while_another_instance_runs_more() -> None:
    limit = BatchLimit()
    for at_s in (1, 2, 3):
        limit = limit.observe([probe(at_s, 36, 1), decode("d2", engine_requests=37, engine_waiting=0)])
    assert limit.requests == math.inf


def test_an_absurd_number_is_forgotten_with_the_next_probe() -> None:
    assert observe(probe(1, 10**9, 0), *(probe(t, 64, 6) for t in (2, 3, 4))) == 64


def test_the_highest_number_counts() -> None:
    limit = BatchLimit(50.0)
    assert observe(*(probe(t, 40, 6) for t in (1, 2, 3)), limit=limit) == 50
    assert observe(*(probe(t, 64, 6) for t in (1, 2, 3)), limit=limit) == 64
