"""Plan when to read a model's config.json, and which instances wait for the result.

The operator mounts no claims and has no hub tokens, so a short-lived pod reads the file where the engines
find it; the excerpt is kept in the status of the service. Each instance keeps the excerpt it was started
with: a late result changes no running engine, and engines of one model that exchange KV are started alike. A
model that cannot be read delays no engine that can start without it. `service` calls `plan_model_read`;
`controller/pods/model_reader_pods` runs the pods.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulcrum_core.api import LaunchSpec, PDInstance
from fulcrum_core.api.engine import Connector, ModelSourceSpec
from fulcrum_core.api.env import EnvVar
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts, parse_model_config
from fulcrum_operator.engines.vllm.user_args import user_identity_fields
from fulcrum_operator.plan.observed import ModelReadAttempt, Observed
from fulcrum_operator.plan.rollout import PoolView

START_FAILURE_TIMEOUT_S = 60.0
"""Seconds after which an attempt fails whose pod cannot start: engines could not start, either."""
READ_TIMEOUT_S = 180.0
"""Seconds after which any attempt fails; pulling the image counts."""
RETRY_PAUSE_MIN_S = 60.0
RETRY_PAUSE_MAX_S = 600.0
"""Pause between attempts, in seconds: doubled each time, within these bounds."""
HUB_ENV = (
    *("HF_ENDPOINT", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Environment variables of an engine that configure access to the hub."""

_ERROR_LENGTH_MAX = 1024
_PATH_LENGTH_MAX = 200


@dataclass(frozen=True, slots=True)
class ModelReadRequest:
    """A model to be read, and the attempt number."""

    launch_spec: LaunchSpec
    key: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Known status of the model, the read to make now, and the next deadline in unix seconds."""

    status: ModelStatus | None = None
    request: ModelReadRequest | None = None
    deadline_s: float | None = None


def model_key(launch_spec: LaunchSpec) -> str:
    """Hash of the model's name, its location and the hub settings: different models have different keys."""
    source = launch_spec.model_source or ModelSourceSpec()
    location: list[str | None] = [
        *(source.pvc, source.host_path, source.path, model_revision(launch_spec), source.token_secret),
        *(field for field in (source.image, source.token_key) if field is not None),
    ]
    settings = sorted(
        ((v.name, v.value_from.dump() if v.value_from else v.value) for v in hub_env(launch_spec)),
        key=lambda setting: setting[0],
    )
    text = json.dumps((launch_spec.model, location, settings))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def model_revision(launch_spec: LaunchSpec) -> str | None:
    """Revision of the model at the hub, None for the hub's default. The user's own arguments win."""
    of_arguments = user_identity_fields(launch_spec.engine.args).get("revision")
    return str(of_arguments) if of_arguments else (launch_spec.model_source or ModelSourceSpec()).revision


def hub_env(launch_spec: LaunchSpec) -> tuple[EnvVar, ...]:
    """The engine's environment variables that configure access to the hub."""
    return tuple(variable for variable in launch_spec.engine.env if variable.name in HUB_ENV)


def parse_model_facts(excerpt: Mapping[str, Any] | None) -> ModelFacts | None:
    """The facts of a model; None where nothing was read, or by a version that kept less."""
    if excerpt is None:
        return None
    try:
        return parse_model_config(excerpt)
    except InvalidInput:
        return None


def plan_model_read(observed: Observed, views: tuple[PoolView, ...]) -> ModelPlan:
    """Plan the next read of the model. A model that was read is not read again until its key changes."""
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
    """Seconds from a failed attempt to the next one."""
    return float(min(RETRY_PAUSE_MAX_S, RETRY_PAUSE_MIN_S * 2 ** min(attempts - 1, 10)))


def waits_for_model(observed: Observed, views: tuple[PoolView, ...], view: PoolView) -> bool:
    """Whether new instances of the pool wait until the read of its model has succeeded or failed."""
    start = _model_to_read(observed, views)
    if start is None or model_key(start) != (key := model_key(view.target)):
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
    """Config excerpt for a new instance of the pool; None: not read.

    It is that of the instances with which the new one exchanges KV, if there are any.
    """
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
    """Launch spec of the first pool with real engines; None if there is none or no pod can read models."""
    real = (view.target for view in views if not view.target.engine.is_simulated)
    return next(real, None) if observed.can_read_models else None


def _instances_of_model(views: tuple[PoolView, ...], key: str) -> Iterator[PDInstance]:
    """Instances of this model in the target revision of their pool."""
    return (member for view in views for member in view.updated if model_key(member.spec) == key)


def _requires_model_facts(launch_spec: LaunchSpec) -> bool:
    """Whether an engine cannot start without model facts: LMCache's buffer size follows from the model."""
    transfer = launch_spec.kv_transfer
    return transfer is not None and transfer.connector is Connector.LMCACHE and transfer.buffer_size is None


def _judge_attempt(
    known: ModelStatus | None, request: ModelReadRequest, attempt: ModelReadAttempt, *, now_s: float
) -> ModelPlan:
    """The plan after this attempt: read, failed, or still running."""
    ends_s = attempt.started_s + (START_FAILURE_TIMEOUT_S if attempt.start_failure else READ_TIMEOUT_S)
    common = {"key": request.key, "attempts": request.attempt, "at": now_s}
    error = attempt.error if attempt.facts is None else _config_error(attempt.facts)
    if attempt.facts is not None and error is None:
        return ModelPlan(status=ModelStatus(config_excerpt=attempt.facts, **common))
    if error is None and now_s >= ends_s:
        waited = f"the pod that reads it did not finish within {now_s - attempt.started_s:.0f} s"
        error = f"{waited}: {attempt.start_failure}" if attempt.start_failure else waited
    if error is None:
        return ModelPlan(status=known, request=request, deadline_s=ends_s)
    error = f"{_describe_location(request.launch_spec)}: {error}"
    failed = ModelStatus(error=error[:_ERROR_LENGTH_MAX], **common)
    return ModelPlan(status=failed, deadline_s=now_s + retry_pause_s(request.attempt))


def _describe_location(launch_spec: LaunchSpec) -> str:
    """The user's field that locates the model, with its value: the reader's paths are those of its pod."""
    source = launch_spec.model_source
    if source is None or source.is_at_hub:
        return f"spec.model ({launch_spec.model})"
    fields = (
        *(("pvc", source.pvc), ("hostPath", source.host_path), ("image", source.image)),
        ("path", source.path),
    )
    named = ", ".join(f"{name}: {_shorten(value)}" for name, value in fields if value)
    return f"spec.modelSource ({named})"


def _shorten(path: str) -> str:
    """Both ends of a long path, so that there is room for the reason after it."""
    half = _PATH_LENGTH_MAX // 2
    return path if len(path) <= _PATH_LENGTH_MAX else f"{path[:half]}…{path[-half:]}"


def _config_error(excerpt: Mapping[str, Any]) -> str | None:
    """Why the excerpt cannot be parsed as a model; None if it can."""
    try:
        parse_model_config(excerpt)
    except InvalidInput as error:
        return str(error)
    return None
