"""Forecasts are corrected by the errors of recent ones, so that fewer requests are refused in vain."""

import math

import pytest

from fulcrum_core.values import AdmissionMode
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext
from fulcrum_router.policy.tiers.forecast_errors import (
    MIN_SAMPLES,
    QUANTILE,
    UNKNOWN_FACTOR,
    WINDOW,
    ForecastErrors,
)
from tests.unit.router.builders import FakeFleet, instance, work


def learn(*ratios: float, forecast_s: float = 3.0) -> ForecastErrors:
    """Requests with a TTFT objective of 3 s that took so many times their forecast."""
    errors = ForecastErrors()
    for ratio in ratios:
        errors.learn(forecast_s=forecast_s, measured_s=ratio * forecast_s, objective_s=3.0)
    return errors


@pytest.mark.parametrize(
    ("errors", "factor"),
    [
        pytest.param(learn(), UNKNOWN_FACTOR, id="nothing was measured"),
        pytest.param(learn(*[0.7] * (MIN_SAMPLES - 1)), UNKNOWN_FACTOR, id="too little was measured"),
        pytest.param(learn(*[0.8] * 30, *[1.2] * 70), 0.8, id="the low quantile"),
        pytest.param(learn(*[1.1] * 100), 1.0, id="all take longer: never made longer"),
        pytest.param(learn(*[0.7] * 100, *[0.9] * WINDOW), 0.9, id="only recent requests count"),
        pytest.param(learn(*[0.01] * 100), 0.5, id="at least half"),
        pytest.param(learn(*[0.97] * 100), 0.97, id="nearly right"),
        pytest.param(learn(*[0.7] * 100, forecast_s=0.1), UNKNOWN_FACTOR, id="far below the objective"),
        pytest.param(learn(*[0.7] * 100, forecast_s=99.0), UNKNOWN_FACTOR, id="far above the objective"),
        pytest.param(learn(*[0.0, math.nan] * 100), UNKNOWN_FACTOR, id="unusable"),
    ],
)
def test_a_forecast_is_corrected_by_what_most_requests_exceed(errors: ForecastErrors, factor: float) -> None:
    assert 0.0 < QUANTILE < 0.3
    assert errors.factor == pytest.approx(factor)


@pytest.mark.parametrize(("is_streamed", "action"), [(True, Action.SEND_PREFILL), (False, Action.FAIL)])
def test_requests_are_admitted_if_such_forecasts_were_too_long(is_streamed: bool, action: Action) -> None:
    """A response that is not streamed does not say when its first token was."""
    fleet = FakeFleet((instance("p1", queued_s=0.85), instance("d1")))
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.admission.mode = AdmissionMode.ADVISE
    for _ in range(MIN_SAMPLES):
        journey = Journey(context, work(100))
        journey.begin(0.0)
        journey.prefill_responded(0.1, lease_from_s=0.1, has_params=True)
        journey.first_byte(0.6, is_streamed=is_streamed)
        journey.decode_ended(0.6)
    context.fleet["p1"].ledger.add_prefill(tokens=100, predicted_s=0.2, now_s=0.0)
    context.admission.mode = AdmissionMode.ENFORCE
    assert Journey(context, work(100)).begin(0.0) is action
