"""The load of a role: the mean over its serving instances, and how an unknown load counts."""

import math

import pytest

from fulcrum_autoscaler.policy import Load, Loads, measure_loads
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import Slo
from tests.unit.autoscaler.builders import decode, make_observation, prefill

SLO = Slo(ttft_s=2.0, tpot_s=0.5)


def load(low: float, high: float | None = None, *, instances: int, unknown: int = 0) -> Load:
    return Load(low=low, high=low if high is None else high, instances=instances, unknown=unknown)


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param((), Loads(prefill=None, decode=None), id="no instance serves"),
        pytest.param(
            (prefill("p-0", 2.0), prefill("p-1", 4.0), decode("d-0", 0.25)),
            Loads(prefill=load(1.5, instances=2), decode=load(0.5, instances=1)),
            id="latencies are divided by their objectives",
        ),
        pytest.param(
            (decode("d-0", 1.0), decode("d-1", None, 0, decode_legs=0)),
            Loads(prefill=None, decode=load(1.0, instances=2)),
            id="an idle instance has load 0",
        ),
        pytest.param(
            (decode("d-0", 2.0), decode("d-1", None)),
            Loads(prefill=None, decode=load(2.0, 2.5, instances=2, unknown=1)),
            id="an unknown load counts as 0 and as 1",
        ),
        pytest.param(
            (prefill("p-0", math.nan), prefill("p-1", -1.0), prefill("p-2", math.inf), prefill("p-3", 0.0)),
            Loads(prefill=load(0.0, 0.75, instances=4, unknown=3), decode=None),
            id="NaN, infinite and negative values are unknown",
        ),
        pytest.param(
            (decode("d-0", None),), Loads(prefill=None, decode=None), id="no load of the role is known"
        ),
        pytest.param(
            (decode("d-0", 0.05, kv_capacity_tokens=1_000, decode_tokens=600),),
            Loads(prefill=None, decode=load(0.75, instances=1)),
            id="a KV cache that fills is a load",
        ),
        pytest.param(
            (decode("d-0", 0.05, decode_is_full=True),),
            Loads(prefill=None, decode=load(1.0, instances=1)),
            id="requests that wait for decode are a load of at least 1",
        ),
        pytest.param(
            (decode("d-0", 0.5), decode("d-1", 5.0, serving=False)),
            Loads(prefill=None, decode=load(1.0, instances=1)),
            id="only serving instances count",
        ),
    ],
)
def test_load_is_the_mean_over_the_serving_instances(
    instances: tuple[InstanceState, ...], expected: Loads
) -> None:
    assert measure_loads(make_observation(*instances), SLO) == expected


def test_the_description_has_both_values_if_a_load_is_unknown() -> None:
    loads = Loads(prefill=load(0.5, instances=2), decode=load(0.5, 1.0, instances=2, unknown=1))
    assert str(loads) == "prefill load 0.50, decode load 0.50 to 1.00 (1 of 2 instances without a figure)"
