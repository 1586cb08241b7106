"""Arrow's Algorithm 3: which instance flips, and why none may."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_autoscaler.policy import NoVictim, RejectedInstance, Victim, choose_victim
from fulcrum_core.api.pdassignment import Floors, Refusal
from fulcrum_core.values import Actor, Role
from tests.unit.autoscaler.builders import (
    NOW_S,
    assignment,
    decode,
    entry,
    make_observation,
    make_rules,
    prefill,
)

P, D = Role.PREFILL, Role.DECODE
SPARE = decode("d-0", 0.01)


@pytest.mark.parametrize(
    ("to", "instances", "victim"),
    [
        pytest.param(D, (prefill("a", 0.3), prefill("b", 0.1)), "b", id="least queued prefill seconds"),
        pytest.param(D, (prefill("a", 0.1), prefill("b", 0.1)), "a", id="a tie goes to the first name"),
        pytest.param(
            D,
            (prefill("a", 0.0), prefill("b", 0.9, decode_legs=1)),
            "b",
            id="half flipped goes before idle",
        ),
        pytest.param(
            D,
            (prefill("a", 0.2, decode_legs=1), prefill("b", 0.1, decode_tokens=9)),
            "b",
            id="of two half flipped the less queued",
        ),
        pytest.param(
            D, (prefill("a", float("nan")), prefill("b", 9.0)), "b", id="an unknown queue goes last"
        ),
        pytest.param(P, (decode("a", tokens=900), decode("b", tokens=800)), "b", id="least resident tokens"),
        pytest.param(
            P,
            (decode("a", tokens=1), decode("b", tokens=800, prefill_tokens=5)),
            "b",
            id="decode that still prefills goes before the emptier",
        ),
        pytest.param(
            P,
            (decode("a", tokens=1), decode("b", tokens=800, prefill_queued_s=0.1)),
            "b",
            id="queued prefill seconds are prefill work, too",
        ),
    ],
)
def test_the_victim_is_the_cheapest_instance(to: Role, instances: tuple[Any, ...], victim: str) -> None:
    found = choose_victim(make_observation(*instances), to, make_rules(), now_s=NOW_S)
    assert isinstance(found, Victim)
    assert found.instance == victim


FAST_PROMPTS, FAST_STEPS = 3.2, 0.4
"""How well the pools of two kinds of hardware suit prefill."""


@pytest.mark.parametrize(
    ("to", "suits_prefill", "victim"),
    [
        pytest.param(P, (FAST_STEPS, FAST_PROMPTS, FAST_PROMPTS), "b", id="the one with fast prompts"),
        pytest.param(D, (FAST_PROMPTS, FAST_STEPS, FAST_STEPS), "b", id="the one with fast steps"),
        pytest.param(P, (0.4, 0.55, 0.4), "a", id="estimates differ a little"),
        pytest.param(P, (FAST_STEPS, None, FAST_PROMPTS), "a", id="one pool was not measured"),
        pytest.param(P, (None, None, None), "a", id="none was"),
    ],
)
def test_what_suits_the_new_role_much_better_goes_first(
    to: Role, suits_prefill: Sequence[float | None], victim: str
) -> None:
    """By their work alone, the order is that of the names."""
    if to is P:
        states = [decode(name, tokens=number) for number, name in enumerate("abc")]
    else:
        states = [prefill(name, number / 10) for number, name in enumerate("abc")]
    states = [
        state.model_copy(update={"suits_prefill": ratio})
        for state, ratio in zip(states, suits_prefill, strict=True)
    ]
    found = choose_victim(make_observation(*states), to, make_rules(), now_s=NOW_S)
    assert isinstance(found, Victim)
    assert found.instance == victim


def test_the_reason_says_which_instances_suit_the_new_role() -> None:
    states = [
        decode(name, tokens=tokens).model_copy(update={"suits_prefill": ratio})
        for name, tokens, ratio in (("a", 1, FAST_STEPS), ("b", 20, FAST_PROMPTS), ("c", 30, FAST_PROMPTS))
    ]
    assert choose_victim(make_observation(*states), P, make_rules(), now_s=NOW_S) == Victim(
        instance="b",
        reason="20 tokens in its KV cache, suits Prefill",
        rejected=(
            RejectedInstance(instance="c", reason="30 tokens in its KV cache"),
            RejectedInstance(instance="a", reason="1 token in its KV cache, suits Decode"),
        ),
    )


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        pytest.param({"cordoned": True}, None, id="cordoned is no candidate"),
        pytest.param(
            {"pinned_until": NOW_S + 60},
            RejectedInstance(instance="a", reason="instance 'a' is pinned to Prefill for 1m more"),
            id="pinned",
        ),
        pytest.param(
            {"refused": Refusal(role=D, reason="did not verify", until=NOW_S + 1)},
            RejectedInstance(
                instance="a", reason="the flip of instance 'a' to Decode was refused: did not verify"
            ),
            id="refused before",
        ),
    ],
)
def test_cordoned_pinned_or_refused_instances_are_never_victims(
    fields: dict[str, Any], refused: RejectedInstance | None
) -> None:
    observation = make_observation(prefill("a", 0.0), prefill("b", 0.5), prefill("c", 0.7))
    roles = {**observation.assignment.roles, "a": entry(P, **fields)}
    found = choose_victim(replace(observation, assignment=assignment(roles)), D, make_rules(), now_s=NOW_S)
    costlier = RejectedInstance(instance="c", reason="0.70 s of prefill queued")
    expected = (refused, costlier) if refused else (costlier,)
    assert found == Victim(instance="b", reason="0.50 s of prefill queued", rejected=expected)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"pinned_until": NOW_S}, id="pin that ran out"),
        pytest.param({"refused": Refusal(role=D, reason="-", until=NOW_S)}, id="refusal that ran out"),
        pytest.param(
            {"refused": Refusal(role=P, reason="-", until=NOW_S + 9)}, id="refusal of the other role"
        ),
        pytest.param({"by": Actor.PERSON}, id="a person's role without a pin"),
    ],
)
def test_expired_pins_and_refusals_protect_no_instance(fields: dict[str, Any]) -> None:
    observation = make_observation(prefill("a", 0.0), prefill("b", 0.5))
    roles = {**observation.assignment.roles, "a": entry(P, **fields)}
    found = choose_victim(replace(observation, assignment=assignment(roles)), D, make_rules(), now_s=NOW_S)
    assert isinstance(found, Victim)
    assert found.instance == "a"


@pytest.mark.parametrize(
    ("serving", "serving_by_router"),
    [
        pytest.param(frozenset({"b", "c", "d-0"}), True, id="operator sees it not serving"),
        pytest.param(frozenset({"a", "b", "c", "d-0"}), False, id="router has ejected it"),
    ],
)
def test_an_instance_that_is_not_serving_is_no_victim(
    serving: frozenset[str], serving_by_router: bool
) -> None:
    sick = prefill("a", 0.0, serving=serving_by_router)
    observation = replace(
        make_observation(sick, prefill("b", 0.5), prefill("c", 0.7), SPARE), serving_by_phase=serving
    )
    found = choose_victim(observation, D, make_rules(), now_s=NOW_S)
    assert isinstance(found, Victim)
    assert found.instance == "b"


def test_a_flip_never_takes_the_source_role_below_its_floor() -> None:
    observation = make_observation(prefill("a"), prefill("b"), SPARE)
    floored = replace(
        observation, assignment=assignment(observation.assignment.roles, floors=Floors(prefill=2, decode=1))
    )
    reason = "1 instance would serve Prefill, the floor is 2; leaving: "
    assert choose_victim(floored, D, make_rules(), now_s=NOW_S) == NoVictim(
        reason=f"{reason}a",
        rejected=(
            RejectedInstance(instance="a", reason=f"{reason}a"),
            RejectedInstance(instance="b", reason=f"{reason}b"),
        ),
    )


def test_the_last_instance_of_a_role_stays_even_with_floor_zero() -> None:
    observation = make_observation(prefill("a"), SPARE)
    free = replace(
        observation, assignment=assignment(observation.assignment.roles, floors=Floors(prefill=0, decode=0))
    )
    assert choose_victim(free, D, make_rules(), now_s=NOW_S) == NoVictim(
        reason="Prefill keeps its last instance: 1 serving"
    )
