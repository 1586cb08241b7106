"""ModelFits: what is worked out, what is seen, and which of them counts."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.models import Fit
from fulcrum_core.values import Phase
from fulcrum_operator.plan import Observed, plan_service
from tests.unit.operator.builders import EXITED, FACTS, RUNNING, STARTING, D, P, engine, settled

PAIR = {"chat-0": P, "chat-1": D}
UNREAD = Fit(verdict="Unknown", reason="ModelUnknown", message="the model's config.json was not read")
FITS = Fit(verdict="True", reason="Fits", message="13.3 requests of 32,768 tokens")
TOO_LARGE = Fit(verdict="False", reason="WeightsTooLarge", message="131.4 GiB of weights do not fit")
LOADED = ("True", "Loaded", "pool chat-flex: its engines have loaded the model")


def observed(fit: Fit | None, *, served: bool = False, ended: str | None = None, **spec: Any) -> Observed:
    """Two vLLM engines of which so much is worked out; they serve, or start, or ended with these words."""
    asked = {"instances": 2, "engine": {"type": "vLLM"}, **spec}
    seen = settled(PAIR, spec=asked)
    state = RUNNING if served else EXITED if ended else STARTING
    start = {name: getattr(seen.service.spec, name) for name in ("engine", "model_source")}
    instances = tuple(
        i.replace(
            spec=i.spec.model_copy(update=start),
            status=i.status
            if served
            else i.status.model_copy(update={"phase": Phase.STARTING, "identity": None}),
        )
        for i in seen.instances
    )
    return replace(
        seen,
        instances=instances,
        engines={name: engine(name, state, exit_reason=ended) for name in PAIR},
        facts=dict.fromkeys(PAIR, replace(FACTS, fit=fit)),
    )


def verdict(seen: Observed) -> tuple[str, str, str]:
    service = next(obj for obj in plan_service(seen).objects if isinstance(obj, PDService))
    found = next(c for c in service.status.conditions if c.type == "ModelFits")
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            settled(PAIR),
            ("Unknown", "NotApplicable", "simulated engines hold no model"),
            id="simulated engines",
        ),
        pytest.param(
            observed(FITS), ("True", "Fits", f"pool chat-flex: {FITS.message}"), id="it fits by its numbers"
        ),
        pytest.param(
            observed(TOO_LARGE),
            ("False", "WeightsTooLarge", f"pool chat-flex: {TOO_LARGE.message}"),
            id="it does not by its numbers",
        ),
        pytest.param(
            observed(UNREAD, modelSource={"pvc": "models"}),
            (
                "Unknown",
                "ModelUnknown",
                "pool chat-flex: the model's config.json was not read: it is in the claim models; "
                "fulcrum plan --model-config can judge it",
            ),
            id="a model in a claim",
        ),
        pytest.param(
            observed(UNREAD),
            (
                "Unknown",
                "ModelUnknown",
                "pool chat-flex: the model's config.json was not read: it is at the hub; "
                "fulcrum plan --model-config can judge it",
            ),
            id="a model of the hub",
        ),
        pytest.param(
            replace(observed(UNREAD), facts={}),
            ("Unknown", "NoInstanceYet", "pool chat-flex: no instance was started yet"),
            id="no instance yet",
        ),
        pytest.param(observed(UNREAD, served=True), LOADED, id="an engine that serves has loaded it"),
        pytest.param(
            observed(TOO_LARGE, served=True), LOADED, id="what serves fits, whatever was worked out"
        ),
        pytest.param(
            observed(FITS, served=True),
            ("True", "Fits", f"pool chat-flex: {FITS.message}"),
            id="the numbers stay when an engine serves",
        ),
        pytest.param(
            observed(FITS, ended="exit code 137 (OOMKilled)"),
            (
                "False",
                "OutOfMemory",
                "pool chat-flex: chat-0 took more memory than it has: exit code 137 (OOMKilled)",
            ),
            id="an engine that was killed for its memory",
        ),
        pytest.param(
            observed(FITS, ended="exit code 1: no such file"),
            ("True", "Fits", f"pool chat-flex: {FITS.message}"),
            id="an engine that ended for another reason",
        ),
    ],
)
def test_whether_a_model_fits(seen: Observed, expected: tuple[str, str, str]) -> None:
    assert verdict(seen) == expected


def test_an_engine_that_served_once_may_be_killed_for_its_memory_without_a_word_of_its_model() -> None:
    seen = observed(UNREAD, served=True)
    killed = engine("chat-0", EXITED, exit_reason="exit code 137 (OOMKilled)")
    assert verdict(replace(seen, engines={**seen.engines, "chat-0": killed})) == LOADED


def test_the_worst_pool_names_the_condition() -> None:
    pools = [{"name": "flex", "instances": {"min": 2}}, {"name": "more", "instances": {"min": 1}}]
    seen = observed(FITS, instances=None, pools=pools)
    extra = seen.pools[0].replace(metadata=seen.pools[0].metadata.model_copy(update={"name": "chat-more"}))
    assert verdict(replace(seen, pools=(*seen.pools, extra))) == (
        "Unknown",
        "NoInstanceYet",
        "pool chat-more: no instance was started yet",
    )
