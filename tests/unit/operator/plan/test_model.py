"""Who reads a model before its engines start, who waits for that, and what stays as it was started."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.models import excerpt, parse_model_config
from fulcrum_operator.manifests.engine_container import fit_of, real_request
from fulcrum_operator.plan import Observed, Plan, plan_service
from fulcrum_operator.plan.model import (
    HINDERED_S,
    PATIENCE_S,
    RETRY_MOST_S,
    facts_of,
    model_key,
    pause_s,
)
from fulcrum_operator.plan.observed import Reading
from fulcrum_operator.plan.pools import desired_pools
from tests.paths import MODELS
from tests.unit.operator.builders import NOW_S, D, P, engines, service, settled

LLAMA: dict[str, Any] = excerpt(json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text()))
VLLM: dict[str, Any] = {"engine": {"type": "vLLM"}, "instances": 2}
PAIR = {"chat-0": P, "chat-1": D}


def key_of(**spec: Any) -> str:
    return model_key(desired_pools(service(**{**VLLM, **spec}), ())[0].spec)


def read(**fields: Any) -> ModelStatus:
    """What stands in the status a second after a try."""
    return ModelStatus(**{"key": key_of(), "attempts": 1, "at": NOW_S - 1, **fields})


def reading(**fields: Any) -> Reading:
    """A first try that began ten seconds ago."""
    return Reading(**{"key": key_of(), "attempt": 1, "born_s": NOW_S - 10, **fields})


def new(known: ModelStatus | None = None, tried: Reading | None = None, **spec: Any) -> Observed:
    """A service of real engines that has its pools and no instance yet."""
    asked = service(**{**VLLM, **spec})
    seen = Observed(service=asked, now_s=NOW_S, reads_models=True, reading=tried)
    return replace(seen, pools=tuple(desired_pools(asked, ()))).with_model(known)


def running(known: ModelStatus | None = None, facts: dict[str, Any] | None = None, **spec: Any) -> Observed:
    """A service whose two instances serve, started with these facts; the spec may ask for more since."""
    pools = desired_pools(service(**VLLM), ())
    start = pools[0].spec.start
    seen = settled(PAIR, spec={**VLLM, **spec}, pools=pools)
    made = {"revision": start.start_revision, "model_facts": facts}
    update = {**{name: getattr(start, name) for name in type(start).model_fields}, **made}
    members = tuple(i.replace(spec=i.spec.model_copy(update=update)) for i in seen.instances)
    return replace(seen, instances=members, reads_models=True).with_model(known)


def born(plan: Plan, seen: Observed) -> list[PDInstance]:
    """The instances that the plan makes."""
    names = {i.metadata.name for i in seen.instances}
    return [o for o in plan.objects if isinstance(o, PDInstance) and o.metadata.name not in names]


def told(plan: Plan) -> ModelStatus | None:
    """What the status says of the model."""
    return next(o for o in plan.objects if isinstance(o, PDService)).status.model


def model_fits(plan: Plan) -> tuple[str, str, str]:
    status = next(o for o in plan.objects if isinstance(o, PDService)).status
    found = next(c for c in status.conditions if c.type == "ModelFits")
    return found.status, found.reason, found.message


def test_the_first_instances_wait_until_the_model_is_read() -> None:
    plan = plan_service(seen := new())
    assert born(plan, seen) == []
    assert plan.read is not None
    assert (plan.read.key, plan.read.attempt, plan.read.start.model) == (key_of(), 1, "m")
    assert model_fits(plan) == (
        "Unknown",
        "NoInstanceYet",
        "pool chat-flex: the model's config.json is being read",
    )


def test_who_reads_is_waited_for_and_looked_at_again_when_that_takes_too_long() -> None:
    plan = plan_service(seen := new(tried=reading()))
    assert (born(plan, seen), plan.read is not None) == ([], True)
    assert plan.wake_after_s == pytest.approx(PATIENCE_S - 10)


def test_what_was_read_is_kept_and_instances_are_started_with_it_at_once() -> None:
    plan = plan_service(seen := new(tried=reading(facts=LLAMA)))
    assert told(plan) == ModelStatus(key=key_of(), facts=LLAMA, attempts=1, at=NOW_S)
    assert [i.spec.model_facts for i in born(plan, seen)] == [LLAMA, LLAMA]
    assert plan.read is None, "the pod is not needed any more"


def test_an_engine_is_planned_with_the_facts_it_is_started_with() -> None:
    plan = plan_service(seen := new(tried=reading(facts=LLAMA)))
    request = real_request(born(plan, seen)[0], seen.service)
    assert request.facts == parse_model_config(LLAMA)


@pytest.mark.parametrize(
    ("tried", "why"),
    [
        pytest.param(reading(error="http://hub/m: status 404"), "http://hub/m: status 404", id="its words"),
        pytest.param(
            reading(born_s=NOW_S - HINDERED_S, hindrance="Unschedulable: 0/3 nodes are available"),
            "the pod that reads it did not end within 60 s: Unschedulable: 0/3 nodes are available",
            id="no node for it",
        ),
        pytest.param(
            reading(born_s=NOW_S - PATIENCE_S),
            "the pod that reads it did not end within 180 s",
            id="no end of it",
        ),
        pytest.param(
            reading(facts={"architectures": ["X"]}),
            "config.json: num_hidden_layers (missing) must be a positive whole number",
            id="what describes no model",
        ),
        pytest.param(
            reading(facts={**LLAMA, "intermediate_size": "wide"}),
            "config.json (ValueError: invalid literal for int() with base 10: 'wide') cannot be understood",
            id="what cannot be understood",
        ),
    ],
)
def test_a_model_that_cannot_be_read_holds_nobody_up(tried: Reading, why: str) -> None:
    plan = plan_service(seen := new(tried=tried))
    assert told(plan) == ModelStatus(key=key_of(), error=why, attempts=1, at=NOW_S)
    assert [i.spec.model_facts for i in born(plan, seen)] == [None, None]
    assert (plan.read, plan.wake_after_s) == (None, 60.0)


def test_a_hindered_reader_gets_its_minute() -> None:
    plan = plan_service(seen := new(tried=reading(hindrance="Unschedulable")))
    assert (born(plan, seen), plan.wake_after_s) == ([], HINDERED_S - 10)


def test_a_try_that_failed_is_not_counted_twice() -> None:
    failed = read(error="no such file")
    plan = plan_service(new(failed, reading(error="no such file")))
    assert (told(plan), plan.read) == (failed, None)


def test_it_is_tried_again_after_growing_pauses() -> None:
    assert [pause_s(count) for count in (1, 2, 3, 4, 5, 2000)] == [60, 120, 240, 480, 600, RETRY_MOST_S]
    plan = plan_service(running(read(error="no such file", attempts=2, at=NOW_S - 119)))
    assert (plan.read, plan.wake_after_s) == (None, 1.0)
    plan = plan_service(running(read(error="no such file", attempts=2, at=NOW_S - 120)))
    assert plan.read is not None
    assert plan.read.attempt == 3


def test_facts_that_come_late_roll_nothing() -> None:
    failed = read(error="no such file")
    seen = replace(running(failed), reading=reading(attempt=2, facts=LLAMA))
    plan = plan_service(seen)
    assert told(plan) == ModelStatus(key=key_of(), facts=LLAMA, attempts=2, at=NOW_S)
    kept = [o for o in plan.objects if isinstance(o, PDInstance)]
    assert [i.spec for i in kept] == [i.spec for i in seen.instances]
    assert (born(plan, seen), plan.start, plan.stop, plan.delete) == ([], (), (), ())


def test_facts_that_come_late_still_say_whether_the_model_fits() -> None:
    seen = running(read(facts=LLAMA))
    member = seen.instances[0]
    request = real_request(member, seen.service)
    assert (request.fit.reason, fit_of(request, member, seen.service).reason) == (
        "ModelUnknown",
        "HardwareUnknown",
    )


def test_an_instance_that_replaces_one_is_started_as_its_siblings_were() -> None:
    for facts in (None, LLAMA):
        seen = running(read(facts=LLAMA), facts)
        seen = replace(seen, instances=seen.instances[:1], engines=engines(["chat-0"]))
        plan = plan_service(seen)
        assert [i.spec.model_facts for i in born(plan, seen)] == [facts], "else they could not hand KV over"


def test_the_next_revision_of_all_is_started_with_what_is_known_by_then() -> None:
    seen = running(read(facts=LLAMA), engine={"type": "vLLM", "args": ["--seed", "7"]})
    assert [i.spec.model_facts for i in born(plan_service(seen), seen)] == [LLAMA]


def test_another_model_is_read_before_the_first_instance_of_its_roll_out() -> None:
    asked = {"model": "acme/next"}
    seen = running(read(facts=LLAMA), LLAMA, **asked)
    plan = plan_service(seen)
    assert (born(plan, seen), told(plan)) == ([], None)
    assert plan.read is not None
    assert plan.read.key == key_of(**asked)
    tried = Reading(key=key_of(**asked), attempt=1, born_s=NOW_S, facts={**LLAMA, "vocab_size": 9})
    plan = plan_service(seen := replace(seen, reading=tried))
    assert [i.spec.model_facts for i in born(plan, seen)] == [{**LLAMA, "vocab_size": 9}]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"modelSource": {"pvc": "models"}},
        {"modelSource": {"revision": "v2"}},
        {"modelSource": {"tokenSecret": "hub"}},
        {"engine": {"type": "vLLM", "env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}]}},
    ],
    ids=str,
)
def test_what_makes_it_another_model(change: dict[str, Any]) -> None:
    assert key_of(**change) != key_of()


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"type": "vLLM", "args": ["--seed", "7"]}},
        {"engine": {"type": "vLLM", "env": [{"name": "UCX_TLS", "value": "tcp"}]}},
        {"modelSource": {"maxLength": 4096}},
        {"modelSource": {"servedName": "m"}},
    ],
    ids=str,
)
def test_what_leaves_it_the_same_model(change: dict[str, Any]) -> None:
    assert key_of(**change) == key_of()


def test_an_engine_that_cannot_be_started_without_waits_for_the_facts_as_long_as_it_takes() -> None:
    lmcache: dict[str, Any] = {"kvTransfer": {"connector": "LMCache"}}
    failed = read(key=key_of(**lmcache), error="no such file")
    plan = plan_service(seen := new(failed, **lmcache))
    assert born(plan, seen) == []
    assert model_fits(plan) == (
        "Unknown",
        "ModelUnknown",
        "pool chat-flex: the model's config.json was not read: no such file",
    )
    written: dict[str, Any] = {"kvTransfer": {"connector": "LMCache", "bufferSize": "2Gi"}}
    plan = plan_service(seen := new(failed, **written))
    assert len(born(plan, seen)) == 2


def test_simulated_engines_hold_no_model_and_wait_for_none() -> None:
    plan = plan_service(seen := new(engine={"type": "Simulated"}))
    assert (len(born(plan, seen)), plan.read) == (2, None)


def test_where_nobody_reads_nobody_waits() -> None:
    plan = plan_service(seen := replace(new(), reads_models=False))
    assert (len(born(plan, seen)), plan.read) == (2, None)


def test_a_service_whose_model_was_read_changes_nothing_on_its_own() -> None:
    seen = running(read(facts=LLAMA), LLAMA)
    plan = plan_service(seen)
    assert (told(plan), plan.read, plan.wake_after_s) == (read(facts=LLAMA), None, None)


def test_what_an_older_version_kept_of_a_model_is_as_good_as_nothing() -> None:
    assert facts_of({"architectures": ["X"], "num_hidden_layers": 2}) is None
