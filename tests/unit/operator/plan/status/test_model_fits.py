"""ModelFits: the estimate, the observation, and which of them has precedence."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.models import Fit
from fulcrum_core.values import Phase
from fulcrum_operator.plan import Observed, plan_service
from tests.unit.operator.builders import ENGINE_FACTS, EXITED, RUNNING, STARTING, D, P, engine, settled

PAIR = {"chat-0": P, "chat-1": D}
CONFIG_NOT_READ = Fit(status="Unknown", reason="ModelUnknown", message="the model's config.json was not read")
FITS = Fit(status="True", reason="Fits", message="13.3 requests of 32,768 tokens")
TOO_LARGE = Fit(status="False", reason="WeightsTooLarge", message="131.4 GiB of weights do not fit")
LOADED = ("True", "Loaded", "pool chat-flex: its engines have loaded the model")


def observed_engines(
    fit: Fit | None,
    *,
    served: bool = False,
    ended: str | None = None,
    out_of_memory: bool = False,
    **spec: Any,
) -> Observed:
    """Two vLLM engines with this estimate; they serve, start, or ended for this reason."""
    spec_fields = {"instances": 2, "engine": {"type": "vLLM"}, **spec}
    observed = settled(PAIR, spec=spec_fields)
    state = RUNNING if served else EXITED if ended else STARTING
    start = {name: getattr(observed.service.spec, name) for name in ("engine", "model_source")}
    instances = tuple(
        i.replace(
            spec=i.spec.model_copy(update=start),
            status=i.status
            if served
            else i.status.model_copy(update={"phase": Phase.STARTING, "identity": None}),
        )
        for i in observed.instances
    )
    return replace(
        observed,
        instances=instances,
        engines={name: engine(name, state, exit_reason=ended, out_of_memory=out_of_memory) for name in PAIR},
        engine_facts=dict.fromkeys(PAIR, replace(ENGINE_FACTS, fit=fit)),
    )


def verdict(observed: Observed) -> tuple[str, str, str]:
    service = next(obj for obj in plan_service(observed).objects if isinstance(obj, PDService))
    found = next(c for c in service.status.conditions if c.type == "ModelFits")
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(
            settled(PAIR),
            ("Unknown", "NotApplicable", "simulated engines load no model"),
            id="simulated engines",
        ),
        pytest.param(
            observed_engines(FITS),
            ("True", "Fits", f"pool chat-flex: {FITS.message}"),
            id="it fits by the estimate",
        ),
        pytest.param(
            observed_engines(TOO_LARGE),
            ("False", "WeightsTooLarge", f"pool chat-flex: {TOO_LARGE.message}"),
            id="it does not fit by the estimate",
        ),
        pytest.param(
            observed_engines(CONFIG_NOT_READ, modelSource={"pvc": "models"}),
            (
                "Unknown",
                "ModelUnknown",
                "pool chat-flex: the model's config.json was not read: it is in the claim models; "
                "run fulcrum plan --model-config to check it",
            ),
            id="a model in a claim",
        ),
        pytest.param(
            observed_engines(CONFIG_NOT_READ),
            (
                "Unknown",
                "ModelUnknown",
                "pool chat-flex: the model's config.json was not read: it is at the hub; "
                "run fulcrum plan --model-config to check it",
            ),
            id="a model of the hub",
        ),
        pytest.param(
            replace(observed_engines(CONFIG_NOT_READ), engine_facts={}),
            ("Unknown", "NoInstanceYet", "pool chat-flex: no instance has started yet"),
            id="no instance yet",
        ),
        pytest.param(
            observed_engines(CONFIG_NOT_READ, served=True), LOADED, id="an engine that serves has loaded it"
        ),
        pytest.param(
            observed_engines(TOO_LARGE, served=True), LOADED, id="a serving engine overrides the estimate"
        ),
        pytest.param(
            observed_engines(FITS, served=True),
            ("True", "Fits", f"pool chat-flex: {FITS.message}"),
            id="the numbers stay when an engine serves",
        ),
        pytest.param(
            observed_engines(FITS, ended="exit code 137 (OOMKilled)", out_of_memory=True),
            (
                "False",
                "OutOfMemory",
                "pool chat-flex: chat-0 used more memory than its limit: exit code 137 (OOMKilled)",
            ),
            id="an engine that was killed for its memory",
        ),
        pytest.param(
            observed_engines(FITS, ended="exit code 1: no such file"),
            ("True", "Fits", f"pool chat-flex: {FITS.message}"),
            id="an engine that ended for another reason",
        ),
    ],
)
def test_model_fits_condition_prefers_what_was_observed_over_the_estimate(
    observed: Observed, expected: tuple[str, str, str]
) -> None:
    assert verdict(observed) == expected


def test_oom_kill_of_an_engine_that_served_does_not_change_model_fits() -> None:
    observed = observed_engines(CONFIG_NOT_READ, served=True)
    killed = engine("chat-0", EXITED, exit_reason="exit code 137 (OOMKilled)", out_of_memory=True)
    assert verdict(replace(observed, engines={**observed.engines, "chat-0": killed})) == LOADED


def test_condition_reports_the_worst_pool() -> None:
    pools = [{"name": "flex", "instances": {"min": 2}}, {"name": "more", "instances": {"min": 1}}]
    observed = observed_engines(FITS, instances=None, pools=pools)
    extra = observed.pools[0].replace(
        metadata=observed.pools[0].metadata.model_copy(update={"name": "chat-more"})
    )
    assert verdict(replace(observed, pools=(*observed.pools, extra))) == (
        "Unknown",
        "NoInstanceYet",
        "pool chat-more: no instance has started yet",
    )
