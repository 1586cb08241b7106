"""What a model is, before its first engine is started: who reads its config.json, and who waits for it.

The operator neither mounts claims nor holds the hub's tokens, so one short pod reads the file where the
engines find it; its answer is kept in the status of the service. What an engine was started with stays
with its instance: an answer that comes late changes nothing that runs, and engines of one model that are to
exchange KV are started alike. A model that cannot be read holds up no engine that can be started without.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulcrum_core.api import LaunchSpec, PDInstance
from fulcrum_core.api.engine import Connector, ModelSourceSpec
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts, parse_model_config
from fulcrum_operator.plan.observed import ModelReadAttempt, Observed
from fulcrum_operator.plan.rollout import PoolView

START_FAILURE_TIMEOUT_S = 60.0
"""A reader that something keeps from starting is given up after so long: engines would not start, either."""
READ_TIMEOUT_S = 180.0
"""Any reader is; its image may have to be fetched."""
RETRY_PAUSE_MIN_S = 60.0
RETRY_PAUSE_MAX_S = 600.0
"""Pauses between tries: each is twice the last one, within these bounds."""
HUB_ENV = (
    *("HF_ENDPOINT", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Of an engine's variables those that say how the hub is reached."""

_ERROR_LENGTH_MAX = 1024


@dataclass(frozen=True, slots=True)
class ModelReadRequest:
    """A model to be read, and the how-manieth try it is."""

    start: LaunchSpec
    key: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What is known of the model, who shall read it, and when to look again (unix seconds)."""

    status: ModelStatus | None = None
    request: ModelReadRequest | None = None
    deadline_s: float | None = None


def model_key(start: LaunchSpec) -> str:
    """What tells one model from another: its name, where it is, and how that is reached."""
    source = start.model_source or ModelSourceSpec()
    location = (source.pvc, source.host_path, source.path, source.revision, source.token_secret)
    text = json.dumps((start.model, location, sorted(hub_env(start).items())))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def hub_env(start: LaunchSpec) -> dict[str, str]:
    """The engine's variables that say how the hub is reached."""
    return {pair.name: pair.value for pair in start.engine.env if pair.name in HUB_ENV}


def parse_model_facts(excerpt: Mapping[str, Any] | None) -> ModelFacts | None:
    """The facts of a model; None where nothing was read, or by a version that kept less."""
    if excerpt is None:
        return None
    try:
        return parse_model_config(excerpt)
    except InvalidInput:
        return None


def plan_model_read(observed: Observed, views: tuple[PoolView, ...]) -> ModelPlan:
    """Once read, a model is not read again while it stays the same."""
    start = _model_to_read(observed, views)
    if start is None:
        return ModelPlan()
    key, known = model_key(start), observed.service.status.model
    known = known if known is not None and known.key == key else None
    if known is not None and known.config_excerpt is not None:
        return ModelPlan(status=known)
    request = ModelReadRequest(start, key, known.attempts + 1 if known else 1)
    attempt = observed.model_read_attempt
    if attempt is not None and (attempt.key, attempt.attempt) == (key, request.attempt):
        return _judge_attempt(known, request, attempt, now_s=observed.now_s)
    due_s = known.at + retry_pause_s(known.attempts) if known else observed.now_s
    if observed.now_s < due_s:
        return ModelPlan(status=known, deadline_s=due_s)
    return ModelPlan(status=known, request=request)


def retry_pause_s(attempts: int) -> float:
    """From a failed try to the next one."""
    return float(min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_MIN_S * 2 ** min(attempts - 1, 10)))


def waits_for_model(observed: Observed, views: tuple[PoolView, ...], view: PoolView) -> bool:
    """Whether a new instance of the pool waits until its model is read, or known not to be readable."""
    wanted = _model_to_read(observed, views)
    if wanted is None or model_key(wanted) != (key := model_key(view.target)):
        return False
    if next(_instances_of_model(views, key), None) is not None:
        return False
    known = observed.service.status.model
    return (
        known is None
        or known.key != key
        or (known.config_excerpt is None and _requires_model_facts(view.target))
    )


def choose_model_facts(
    observed: Observed, views: tuple[PoolView, ...], view: PoolView
) -> dict[str, Any] | None:
    """What a new instance of the pool is started with: as those that it will exchange KV with were."""
    key, known = model_key(view.target), observed.service.status.model
    like = next(_instances_of_model(views, key), None)
    if like is not None:
        return like.spec.config_excerpt
    return known.config_excerpt if known is not None and known.key == key else None


def with_model_status(observed: Observed, known: ModelStatus | None) -> Observed:
    """`observed` with this model status in the status of its service."""
    status = observed.service.status
    if status.model == known:
        return observed
    service = observed.service.replace(status=status.model_copy(update={"model": known}))
    return replace(observed, service=service)


def _model_to_read(observed: Observed, views: tuple[PoolView, ...]) -> LaunchSpec | None:
    """What new engines that hold a model are started with, where somebody can read it."""
    real = (view.target for view in views if view.target.engine.type != "Simulated")
    return next(real, None) if observed.can_read_models else None


def _instances_of_model(views: tuple[PoolView, ...], key: str) -> Iterator[PDInstance]:
    """Instances of this model that stay."""
    return (member for view in views for member in view.updated if model_key(member.spec) == key)


def _requires_model_facts(start: LaunchSpec) -> bool:
    """Whether there is no engine without: the size of LMCache's buffer follows from the model."""
    transfer = start.kv_transfer
    return transfer is not None and transfer.connector is Connector.LMCACHE and transfer.buffer_size is None


def _judge_attempt(
    known: ModelStatus | None, request: ModelReadRequest, attempt: ModelReadAttempt, *, now_s: float
) -> ModelPlan:
    """What came of a try, if anything did."""
    ends_s = attempt.started_s + (START_FAILURE_TIMEOUT_S if attempt.start_failure else READ_TIMEOUT_S)
    common = {"key": request.key, "attempts": request.attempt, "at": now_s}
    error = attempt.error if attempt.facts is None else _config_error(attempt.facts)
    if attempt.facts is not None and error is None:
        return ModelPlan(status=ModelStatus(config_excerpt=attempt.facts, **common))
    if error is None and now_s >= ends_s:
        waited = f"the pod that reads it did not end within {now_s - attempt.started_s:.0f} s"
        error = f"{waited}: {attempt.start_failure}" if attempt.start_failure else waited
    if error is None:
        return ModelPlan(status=known, request=request, deadline_s=ends_s)
    failed = ModelStatus(error=error[:_ERROR_LENGTH_MAX], **common)
    return ModelPlan(status=failed, deadline_s=now_s + retry_pause_s(request.attempt))


def _config_error(excerpt: Mapping[str, Any]) -> str | None:
    """Why this describes no model that is known here; None if it does."""
    try:
        parse_model_config(excerpt)
    except InvalidInput as error:
        return str(error)
    return None
