"""Who caused the failure of a leg, and whether it is evidence against the instance."""

import pytest

from fulcrum_router.policy.faults.blame import Blame, find_blame, is_sickness
from fulcrum_router.policy.faults.failures import Failure


@pytest.mark.parametrize(
    ("failure", "status", "probes_answered", "blame", "sick"),
    [
        pytest.param(Failure.STATUS, 500, True, Blame.ENGINE, True, id="an internal error"),
        pytest.param(Failure.STATUS, 503, True, Blame.LOAD, False, id="an engine that sheds load"),
        pytest.param(Failure.STATUS, 429, True, Blame.LOAD, False, id="an engine that limits its rate"),
        pytest.param(Failure.STATUS, 400, True, Blame.CLIENT, False, id="a request that is refused"),
        pytest.param(Failure.TIMEOUT, 0, True, Blame.LOAD, False, id="a leg that is late in a queue"),
        pytest.param(Failure.TIMEOUT, 0, False, Blame.ENGINE, True, id="silence on legs and probes"),
        pytest.param(Failure.TOO_LONG, 0, True, Blame.LOAD, False, id="a response that takes too long"),
        pytest.param(Failure.TOO_LONG, 0, False, Blame.ENGINE, True, id="a drip while probes fail"),
        pytest.param(Failure.TOO_LARGE, 0, True, Blame.CLIENT, False, id="an answer that is too large"),
        pytest.param(Failure.MALFORMED, 0, True, Blame.ENGINE, True, id="an answer that is no HTTP"),
        pytest.param(Failure.CLOSED, 0, True, Blame.ENGINE, True, id="a connection that breaks"),
        pytest.param(Failure.REFUSED, 0, True, Blame.NETWORK, True, id="no engine at the address"),
        pytest.param(Failure.NO_SOCKET, 0, True, Blame.ROUTER, False, id="a router without sockets"),
        pytest.param(Failure.EJECTED, 0, True, Blame.ENGINE, False, id="an instance already ejected"),
        pytest.param(Failure.REMOVED, 0, True, Blame.ROUTER, False, id="an instance that was removed"),
    ],
)
def test_only_engine_and_network_are_evidence_against_an_instance(
    failure: Failure, status: int, probes_answered: bool, blame: Blame, sick: bool
) -> None:
    found = find_blame(failure, status=status, probes_answered=probes_answered)
    assert (found, is_sickness(failure, found)) == (blame, sick)


def test_every_failure_has_somebody_to_blame() -> None:
    assert {find_blame(failure, status=500, probes_answered=True) for failure in Failure} == set(Blame)
