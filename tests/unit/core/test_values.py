"""Roles and SLOs: opposite roles, phases that a role serves, and when an SLO is met."""

import pytest

from fulcrum_core.values import Role, Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def test_each_phase_has_one_opposite() -> None:
    assert (Role.PREFILL.other, Role.DECODE.other) == (Role.DECODE, Role.PREFILL)


def test_both_has_no_opposite() -> None:
    with pytest.raises(ValueError, match="no opposite"):
        _ = Role.BOTH.other


@pytest.mark.parametrize(
    ("role", "phases"),
    [(Role.PREFILL, {Role.PREFILL}), (Role.DECODE, {Role.DECODE}), (Role.BOTH, {Role.PREFILL, Role.DECODE})],
)
def test_role_serves_its_own_phase_and_both_serves_each(role: Role, phases: set[Role]) -> None:
    assert {phase for phase in (Role.PREFILL, Role.DECODE) if role.serves(phase)} == phases


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [
        pytest.param(1.0, 0.05, True, id="both exactly met"),
        pytest.param(1.01, 0.01, False, id="first token too late"),
        pytest.param(0.1, 0.051, False, id="tokens too slow"),
        pytest.param(0.1, None, True, id="a single token has no TPOT"),
        pytest.param(2.0, None, False, id="a single token, too late"),
    ],
)
def test_slo_is_met_only_if_ttft_and_tpot_are(ttft_s: float, tpot_s: float | None, met: bool) -> None:
    assert SLO.is_met(ttft_s=ttft_s, tpot_s=tpot_s) is met
