"""When a model is read, which instances wait for it, and that running instances keep their config."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.models import excerpt_config, parse_model_config
from fulcrum_operator.manifests.engine_container import judge_instance_fit, vllm_launch_request
from fulcrum_operator.plan import Observed, Plan, plan_service
from fulcrum_operator.plan.model import (
    READ_TIMEOUT_S,
    RETRY_PAUSE_MAX_S,
    START_FAILURE_TIMEOUT_S,
    model_key,
    parse_model_facts,
    retry_pause_s,
    with_model_status,
)
from fulcrum_operator.plan.observed import ModelReadAttempt
from fulcrum_operator.plan.pools import desired_pools
from tests.paths import MODELS
from tests.unit.operator.builders import NOW_S, D, P, engines, service, settled

LLAMA: dict[str, Any] = excerpt_config(json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text()))
VLLM: dict[str, Any] = {"engine": {"type": "vLLM"}, "instances": 2}
PAIR = {"chat-0": P, "chat-1": D}


def model_key_of(**spec: Any) -> str:
    return model_key(desired_pools(service(**{**VLLM, **spec}), ())[0].spec)


def model_status(**fields: Any) -> ModelStatus:
    """Model status one second after an attempt."""
    return ModelStatus(**{"key": model_key_of(), "attempts": 1, "at": NOW_S - 1, **fields})


def read_attempt(**fields: Any) -> ModelReadAttempt:
    """A first attempt that began ten seconds ago."""
    return ModelReadAttempt(**{"key": model_key_of(), "attempt": 1, "started_s": NOW_S - 10, **fields})


def new_service(
    known: ModelStatus | None = None, attempt: ModelReadAttempt | None = None, **spec: Any
) -> Observed:
    """A service with real engines and its pools, without instances."""
    requested = service(**{**VLLM, **spec})
    observed = Observed(service=requested, now_s=NOW_S, can_read_models=True, model_read_attempt=attempt)
    return with_model_status(replace(observed, pools=tuple(desired_pools(requested, ()))), known)


def running_service(
    known: ModelStatus | None = None, facts: dict[str, Any] | None = None, **spec: Any
) -> Observed:
    """A service with two serving instances, started with these facts; `spec` overrides its fields."""
    pools = desired_pools(service(**VLLM), ())
    launch_spec = pools[0].spec.launch_spec
    observed = settled(PAIR, spec={**VLLM, **spec}, pools=pools)
    made = {"revision": launch_spec.launch_revision, "config_excerpt": facts}
    update = {**{name: getattr(launch_spec, name) for name in type(launch_spec).model_fields}, **made}
    members = tuple(i.replace(spec=i.spec.model_copy(update=update)) for i in observed.instances)
    return with_model_status(replace(observed, instances=members, can_read_models=True), known)


def created_instances(plan: Plan, observed: Observed) -> list[PDInstance]:
    """The instances that the plan creates."""
    names = {i.metadata.name for i in observed.instances}
    return [o for o in plan.objects if isinstance(o, PDInstance) and o.metadata.name not in names]


def reported_model(plan: Plan) -> ModelStatus | None:
    """The model in the planned status."""
    return next(o for o in plan.objects if isinstance(o, PDService)).status.model


def model_fits(plan: Plan) -> tuple[str, str, str]:
    status = next(o for o in plan.objects if isinstance(o, PDService)).status
    found = next(c for c in status.conditions if c.type == "ModelFits")
    return found.status, found.reason, found.message


def test_the_first_instances_wait_until_the_model_is_read() -> None:
    plan = plan_service(observed := new_service())
    assert created_instances(plan, observed) == []
    assert plan.model_read is not None
    assert (plan.model_read.key, plan.model_read.attempt, plan.model_read.launch_spec.model) == (
        model_key_of(),
        1,
        "m",
    )
    assert model_fits(plan) == (
        "Unknown",
        "NoInstanceYet",
        "pool chat-flex: the model's config.json is being read",
    )


def test_plan_waits_for_the_reader_until_its_timeout() -> None:
    plan = plan_service(observed := new_service(attempt=read_attempt()))
    assert (created_instances(plan, observed), plan.model_read is not None) == ([], True)
    assert plan.requeue_after_s == pytest.approx(READ_TIMEOUT_S - 10)


def test_read_model_is_kept_and_instances_start_with_it() -> None:
    plan = plan_service(observed := new_service(attempt=read_attempt(facts=LLAMA)))
    assert reported_model(plan) == ModelStatus(key=model_key_of(), config_excerpt=LLAMA, attempts=1, at=NOW_S)
    assert [i.spec.config_excerpt for i in created_instances(plan, observed)] == [LLAMA, LLAMA]
    assert plan.model_read is None, "the pod is not needed any more"


def test_launch_request_has_the_model_facts_of_its_instance() -> None:
    plan = plan_service(observed := new_service(attempt=read_attempt(facts=LLAMA)))
    request = vllm_launch_request(created_instances(plan, observed)[0], observed.service)
    assert request.facts == parse_model_config(LLAMA)


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        pytest.param(
            read_attempt(error="http://hub/m: status 404"),
            "http://hub/m: status 404",
            id="the reader reports an error",
        ),
        pytest.param(
            read_attempt(
                started_s=NOW_S - START_FAILURE_TIMEOUT_S,
                start_failure="Unschedulable: 0/3 nodes are available",
            ),
            "the pod that reads it did not finish within 60 s: Unschedulable: 0/3 nodes are available",
            id="the pod gets no node",
        ),
        pytest.param(
            read_attempt(started_s=NOW_S - READ_TIMEOUT_S),
            "the pod that reads it did not finish within 180 s",
            id="the pod does not finish",
        ),
        pytest.param(
            read_attempt(facts={"architectures": ["X"]}),
            "config.json: num_hidden_layers (missing) must be a positive whole number",
            id="the config describes no model",
        ),
        pytest.param(
            read_attempt(facts={**LLAMA, "intermediate_size": "wide"}),
            "config.json (ValueError: invalid literal for int() with base 10: 'wide') describes no model",
            id="the config cannot be parsed",
        ),
    ],
)
def test_unreadable_model_does_not_delay_instances(attempt: ModelReadAttempt, why: str) -> None:
    plan = plan_service(observed := new_service(attempt=attempt))
    assert reported_model(plan) == ModelStatus(
        key=model_key_of(), error=f"spec.model (m): {why}", attempts=1, at=NOW_S
    )
    assert [i.spec.config_excerpt for i in created_instances(plan, observed)] == [None, None]
    assert (plan.model_read, plan.requeue_after_s) == (None, 60.0)


@pytest.mark.parametrize(
    ("source", "location"),
    [
        pytest.param({}, "spec.model (m)", id="hub"),
        pytest.param({"revision": "v2", "tokenSecret": "hub"}, "spec.model (m)", id="revision of the hub"),
        pytest.param({"pvc": "models"}, "spec.modelSource (pvc: models)", id="claim"),
        pytest.param(
            {"pvc": "models", "path": "lama"}, "spec.modelSource (pvc: models, path: lama)", id="in a claim"
        ),
        pytest.param(
            {"hostPath": "/srv", "path": "lama"}, "spec.modelSource (hostPath: /srv, path: lama)", id="node"
        ),
        pytest.param(
            {"image": "registry.example/lama:1"},
            "spec.modelSource (image: registry.example/lama:1)",
            id="image",
        ),
        pytest.param(
            {"hostPath": f"/{'a' * 1023}", "path": "b" * 1024},
            f"spec.modelSource (hostPath: /{'a' * 99}…{'a' * 100}, path: {'b' * 100}…{'b' * 100})",
            id="long paths leave room for the reason",
        ),
    ],
)
def test_error_begins_with_the_users_field_and_its_value(source: dict[str, Any], location: str) -> None:
    change: dict[str, Any] = {"modelSource": source}
    attempt = replace(read_attempt(error="no such file"), key=model_key_of(**change))
    found = reported_model(plan_service(new_service(attempt=attempt, **change)))
    assert found is not None
    assert found.error == f"{location}: no such file"


def test_reader_pod_that_cannot_start_is_given_one_minute() -> None:
    plan = plan_service(observed := new_service(attempt=read_attempt(start_failure="Unschedulable")))
    assert (created_instances(plan, observed), plan.requeue_after_s) == ([], START_FAILURE_TIMEOUT_S - 10)


def test_failed_attempt_is_counted_once() -> None:
    failed = model_status(error="no such file")
    plan = plan_service(new_service(failed, read_attempt(error="no such file")))
    assert (reported_model(plan), plan.model_read) == (failed, None)


def test_reading_is_retried_after_growing_pauses() -> None:
    assert [retry_pause_s(count) for count in (1, 2, 3, 4, 5, 2000)] == [
        60,
        120,
        240,
        480,
        600,
        RETRY_PAUSE_MAX_S,
    ]
    plan = plan_service(running_service(model_status(error="no such file", attempts=2, at=NOW_S - 119)))
    assert (plan.model_read, plan.requeue_after_s) == (None, 1.0)
    plan = plan_service(running_service(model_status(error="no such file", attempts=2, at=NOW_S - 120)))
    assert plan.model_read is not None
    assert plan.model_read.attempt == 3


def test_late_model_facts_start_no_rollout() -> None:
    failed = model_status(error="no such file")
    observed = replace(running_service(failed), model_read_attempt=read_attempt(attempt=2, facts=LLAMA))
    plan = plan_service(observed)
    assert reported_model(plan) == ModelStatus(key=model_key_of(), config_excerpt=LLAMA, attempts=2, at=NOW_S)
    kept = [o for o in plan.objects if isinstance(o, PDInstance)]
    assert [i.spec for i in kept] == [i.spec for i in observed.instances]
    assert (created_instances(plan, observed), plan.start, plan.stop, plan.delete) == ([], (), (), ())


def test_late_model_facts_still_decide_whether_the_model_fits() -> None:
    observed = running_service(model_status(config_excerpt=LLAMA))
    member = observed.instances[0]
    request = vllm_launch_request(member, observed.service)
    assert (request.fit.reason, judge_instance_fit(request, member, observed.service).reason) == (
        "ModelUnknown",
        "HardwareUnknown",
    )


def test_replacement_starts_with_the_model_facts_of_its_siblings() -> None:
    for facts in (None, LLAMA):
        observed = running_service(model_status(config_excerpt=LLAMA), facts)
        observed = replace(observed, instances=observed.instances[:1], engines=engines(["chat-0"]))
        plan = plan_service(observed)
        assert [i.spec.config_excerpt for i in created_instances(plan, observed)] == [facts], (
            "else they could not hand KV over"
        )


def test_next_revision_starts_with_the_model_facts_known_then() -> None:
    observed = running_service(
        model_status(config_excerpt=LLAMA), engine={"type": "vLLM", "args": ["--seed", "7"]}
    )
    assert [i.spec.config_excerpt for i in created_instances(plan_service(observed), observed)] == [LLAMA]


def test_new_model_is_read_before_its_rollout_starts() -> None:
    requested = {"model": "acme/next"}
    observed = running_service(model_status(config_excerpt=LLAMA), LLAMA, **requested)
    plan = plan_service(observed)
    assert (created_instances(plan, observed), reported_model(plan)) == ([], None)
    assert plan.model_read is not None
    assert plan.model_read.key == model_key_of(**requested)
    attempt = ModelReadAttempt(
        key=model_key_of(**requested), attempt=1, started_s=NOW_S, facts={**LLAMA, "vocab_size": 9}
    )
    plan = plan_service(observed := replace(observed, model_read_attempt=attempt))
    assert [i.spec.config_excerpt for i in created_instances(plan, observed)] == [{**LLAMA, "vocab_size": 9}]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"modelSource": {"pvc": "models"}},
        {"modelSource": {"revision": "v2"}},
        {"engine": {"type": "vLLM", "args": ["--revision", "v2"]}},
        {"modelSource": {"image": "registry.example/lama:1"}},
        {"modelSource": {"tokenSecret": "hub"}},
        {"modelSource": {"tokenSecret": "hub", "tokenKey": "read"}},
        {"engine": {"type": "vLLM", "env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}]}},
    ],
    ids=str,
)
def test_model_key_changes_with_name_location_and_hub(change: dict[str, Any]) -> None:
    assert model_key_of(**change) != model_key_of()


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"type": "vLLM", "args": ["--seed", "7"]}},
        {"engine": {"type": "vLLM", "env": [{"name": "UCX_TLS", "value": "tcp"}]}},
        {"modelSource": {"maxLength": 4096}},
        {"modelSource": {"servedName": "m"}},
        {"modelSource": {"downloads": {"pvc": "models"}}},
    ],
    ids=str,
)
def test_model_key_ignores_settings_that_do_not_change_the_files(change: dict[str, Any]) -> None:
    assert model_key_of(**change) == model_key_of()


def test_engine_that_needs_model_facts_waits_for_them() -> None:
    lmcache: dict[str, Any] = {"kvTransfer": {"connector": "LMCache"}}
    failed = model_status(key=model_key_of(**lmcache), error="no such file")
    plan = plan_service(observed := new_service(failed, **lmcache))
    assert created_instances(plan, observed) == []
    assert model_fits(plan) == (
        "Unknown",
        "ModelUnknown",
        "pool chat-flex: the model's config.json was not read: no such file",
    )
    written: dict[str, Any] = {"kvTransfer": {"connector": "LMCache", "bufferSize": "2Gi"}}
    plan = plan_service(observed := new_service(failed, **written))
    assert len(created_instances(plan, observed)) == 2


def test_simulated_engines_hold_no_model_and_wait_for_none() -> None:
    plan = plan_service(observed := new_service(engine={"type": "Simulated"}))
    assert (len(created_instances(plan, observed)), plan.model_read) == (2, None)


def test_without_a_model_reader_instances_do_not_wait() -> None:
    plan = plan_service(observed := replace(new_service(), can_read_models=False))
    assert (len(created_instances(plan, observed)), plan.model_read) == (2, None)


def test_a_model_that_was_read_needs_no_further_reconcile() -> None:
    observed = running_service(model_status(config_excerpt=LLAMA), LLAMA)
    plan = plan_service(observed)
    assert (reported_model(plan), plan.model_read, plan.requeue_after_s) == (
        model_status(config_excerpt=LLAMA),
        None,
        None,
    )


def test_excerpt_of_an_older_version_counts_as_not_read() -> None:
    assert parse_model_facts({"architectures": ["X"], "num_hidden_layers": 2}) is None
