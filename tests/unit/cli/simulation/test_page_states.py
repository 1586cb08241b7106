"""A simulated run as the live page replays it: roles, work of instances, rates and latencies."""

from typing import Any

import pytest

from fulcrum_cli.simulation.page_states import build_states
from fulcrum_core.values import Role
from fulcrum_simulator.fleet.run import RunResult
from tests.simulated_runs import run_equal_requests


@pytest.fixture(scope="module")
def result() -> RunResult:
    return run_equal_requests("static:2P2D", tiers=("gold", "free"))


@pytest.fixture(scope="module")
def states(result: RunResult) -> list[dict[str, Any]]:
    return list(build_states(result, load="a test"))


def test_there_is_a_state_a_second_until_the_end(result: RunResult, states: list[dict[str, Any]]) -> None:
    assert [state["at_s"] for state in states] == [float(second) for second in range(int(result.end_s) + 1)]


def test_requests_are_in_prefill_or_decode_or_wait(states: list[dict[str, Any]]) -> None:
    state = states[30]
    prefill, decode = state["tiles"][:2], state["tiles"][2:]
    assert [tile["role"] for tile in state["tiles"]] == [Role.PREFILL] * 2 + [Role.DECODE] * 2
    assert all(tile["decodes"] == 0 for tile in prefill)
    assert all(tile["prefills"] == 0 and tile["decodes"] > 0 and 0 < tile["kv"] < 1 for tile in decode)


def test_rates_and_latencies_are_those_of_the_requests(states: list[dict[str, Any]]) -> None:
    state = states[30]
    rates = state["rates"]
    assert (rates["offered"], [tier["name"] for tier in state["tiers"]]) == (4.0, ["free", "gold"])
    assert sum(rate for _, _, rate in state["flows"]) == pytest.approx(4.0, abs=1.0)
    assert rates["output_tokens"] == pytest.approx(4 * 200, rel=0.2)
    assert 0 < state["ttft"]["p50_s"] <= state["ttft"]["p99_s"] < 3
    assert state["attained"] == 1.0


def test_a_run_that_has_not_begun_shows_nothing_and_no_tier(states: list[dict[str, Any]]) -> None:
    state = states[0]
    assert (state["attained"], state["ttft"]["p50_s"], state["desired"]) == (None, None, (2, 2))


def test_flips_change_roles_and_are_logged_in_words() -> None:
    result = run_equal_requests("arrow:1P3D", rate_rps=6.0, tokens=12_000)
    states = list(build_states(result, load="a test"))
    assert result.flips, "prompts that one instance cannot compute cause flips"
    first, at = result.flips[0], int(result.flips[0].at_s) + 1
    role = {tile["name"]: tile["role"] for tile in states[at]["tiles"]}
    assert states[-1]["flips"] == len(result.flips)
    assert states[0]["desired"] == (1, 3)
    assert role[first.instance] == first.to
    assert first.reason in [decision["reason"] for decision in states[at]["decisions"]]


def test_instances_of_a_colocated_fleet_serve_both_roles_and_prompts_where_they_decode() -> None:
    state = list(build_states(run_equal_requests("colocated"), load="a test"))[30]
    assert {tile["role"] for tile in state["tiles"]} == {Role.BOTH}
    assert state["rates"]["local_prefills"] == pytest.approx(4.0, abs=1.0)


@pytest.mark.parametrize(
    ("policy", "mode"), [("static:2P2D", "Off"), ("colocated", "Off"), ("arrow", "Auto"), ("xllm", "Auto")]
)
def test_only_policies_that_flip_show_autoscaling_and_no_objective_is_invented(
    policy: str, mode: str
) -> None:
    state = next(build_states(run_equal_requests(policy, rate_rps=0.2), load="a test"))
    assert (state["mode"], state["slo"]) == (mode, {"ttft_s": 3.0, "tpot_s": 0.1, "attained": None})
