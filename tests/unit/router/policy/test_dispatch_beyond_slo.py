"""A request that no idle instance could serve within the SLO has nobody flipped for it."""

from dataclasses import replace

import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_router.policy import Dispatch, FlipRules, FlipWanted, choose_decode, choose_prefill
from tests.unit.router.builders import SLO, instance

FLIPS = FlipRules(enabled=True)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(1000, FlipWanted, id="1.0 s of prefill meets 1 s on an idle instance"),
        pytest.param(1001, Dispatch, id="more than that would be late there, too"),
    ],
)
def test_prefill_wants_a_flip_for_a_prompt_of(tokens: int, kind: type) -> None:
    fleet = [instance("p1", queued_s=3.0), instance("d1"), instance("d2")]
    assert isinstance(choose_prefill(fleet, tokens, SLO, rules=FLIPS), kind)


def test_one_fast_enough_instance_to_flip_is_reason_enough() -> None:
    fast = replace(instance("d2"), prefill_model=PrefillModel(c0=0.0, c1=1e-4, c2=0.0))
    fleet = [instance("p1", queued_s=3.0), instance("d1"), fast]
    assert isinstance(choose_prefill(fleet, 5000, SLO, rules=FLIPS), FlipWanted)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(3999, FlipWanted, id="it fits an idle instance within 50 ms"),
        pytest.param(4001, Dispatch, id="it is too long for any batch"),
    ],
)
def test_decode_wants_a_flip_for_a_context_of(tokens: int, kind: type) -> None:
    fleet = [instance("p1"), instance("p2"), instance("d1", decoding=3999)]
    assert isinstance(choose_decode(fleet, tokens, SLO, rules=FLIPS), kind)
