"""A request that no idle instance could serve within the SLO has nobody flipped for it."""

from dataclasses import replace

import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_router.policy import Dispatch, FlipProposal, FlipProposalRules, choose_decode, choose_prefill
from tests.unit.router.builders import SLO, instance

FLIPS = FlipProposalRules(enabled=True)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(1000, FlipProposal, id="1.0 s of prefill meets 1 s on an idle instance"),
        pytest.param(1001, Dispatch, id="more than that would be late there, too"),
    ],
)
def test_prefill_proposes_a_flip_only_if_an_idle_instance_meets_the_slo(tokens: int, kind: type) -> None:
    fleet = [instance("p1", queued_s=3.0), instance("d1"), instance("d2")]
    assert isinstance(choose_prefill(fleet, tokens, SLO, rules=FLIPS), kind)


def test_one_instance_that_is_fast_enough_suffices_to_propose_a_flip() -> None:
    fast = replace(instance("d2"), prefill_model=PrefillModel(c0=0.0, c1=1e-4, c2=0.0))
    fleet = [instance("p1", queued_s=3.0), instance("d1"), fast]
    assert isinstance(choose_prefill(fleet, 5000, SLO, rules=FLIPS), FlipProposal)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(3999, FlipProposal, id="it fits an idle instance within 50 ms"),
        pytest.param(4001, Dispatch, id="it is too long for any batch"),
    ],
)
def test_decode_proposes_a_flip_only_if_an_idle_instance_fits_the_context(tokens: int, kind: type) -> None:
    fleet = [instance("p1"), instance("p2"), instance("d1", decoding=3999)]
    assert isinstance(choose_decode(fleet, tokens, SLO, rules=FLIPS), kind)
