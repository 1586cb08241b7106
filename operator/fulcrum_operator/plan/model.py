"""What a model is, before its first engine is started: who reads its config.json, and who waits for it.

The operator neither mounts claims nor holds the hub's tokens, so one short pod reads the file where the
engines find it; its answer is kept in the status of the service. What an engine was started with stays
with its instance: an answer that comes late changes nothing that runs, and engines of one model that are to
exchange KV are started alike. A model that cannot be read holds up no engine that can be started without.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fulcrum_core.api import PDInstance, StartSpec
from fulcrum_core.api.engine import Connector, ModelSourceSpec
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts, parse_model_config
from fulcrum_operator.plan.observed import Observed, Reading
from fulcrum_operator.plan.rollout import PoolView

HINDERED_S = 60.0
"""A reader that something keeps from starting is given up after so long: engines would not start, either."""
PATIENCE_S = 180.0
"""Any reader is; its image may have to be fetched."""
RETRY_LEAST_S = 60.0
RETRY_MOST_S = 600.0
"""Pauses between tries: each is twice the last one, within these bounds."""
HUB_ENV = (
    *("HF_ENDPOINT", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Of an engine's variables those that say how the hub is reached."""

_WORDS = 1024


@dataclass(frozen=True, slots=True)
class Read:
    """A model to be read, and the how-manieth try it is."""

    start: StartSpec
    key: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of the model, who shall read it, and when to look again (unix seconds)."""

    status: ModelStatus | None = None
    read: Read | None = None
    deadline_s: float | None = None


def model_key(start: StartSpec) -> str:
    """What tells one model from another: its name, where it is, and how that is reached."""
    source = start.model_source or ModelSourceSpec()
    place = (source.pvc, source.host_path, source.path, source.revision, source.token_secret)
    text = json.dumps((start.model, place, sorted(hub_env(start).items())))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def hub_env(start: StartSpec) -> dict[str, str]:
    """The engine's variables that say how the hub is reached."""
    return {pair.name: pair.value for pair in start.engine.env if pair.name in HUB_ENV}


def facts_of(excerpt: Mapping[str, Any] | None) -> ModelFacts | None:
    """The facts of a model; None where nothing was read, or by a version that kept less."""
    if excerpt is None:
        return None
    try:
        return parse_model_config(excerpt)
    except InvalidInput:
        return None


def model_outlook(seen: Observed, views: tuple[PoolView, ...]) -> Outlook:
    """Once read, a model is not read again while it stays the same."""
    start = _wanted(seen, views)
    if start is None:
        return Outlook()
    key, known = model_key(start), seen.service.status.model
    known = known if known is not None and known.key == key else None
    if known is not None and known.facts is not None:
        return Outlook(status=known)
    read = Read(start, key, known.attempts + 1 if known else 1)
    reading = seen.reading
    if reading is not None and (reading.key, reading.attempt) == (key, read.attempt):
        return _in_progress(known, read, reading, now_s=seen.now_s)
    due_s = known.at + pause_s(known.attempts) if known else seen.now_s
    if seen.now_s < due_s:
        return Outlook(status=known, deadline_s=due_s)
    return Outlook(status=known, read=read)


def pause_s(attempts: int) -> float:
    """From a failed try to the next one."""
    return float(min(RETRY_MOST_S, RETRY_LEAST_S * 2 ** min(attempts - 1, 10)))


def awaits_model(seen: Observed, views: tuple[PoolView, ...], view: PoolView) -> bool:
    """Whether a new instance of the pool waits until its model is read, or known not to be readable."""
    wanted = _wanted(seen, views)
    if wanted is None or model_key(wanted) != (key := model_key(view.target)):
        return False
    if next(_alike(views, key), None) is not None:
        return False
    known = seen.service.status.model
    return known is None or known.key != key or (known.facts is None and _needs_facts(view.target))


def facts_for(seen: Observed, views: tuple[PoolView, ...], view: PoolView) -> dict[str, Any] | None:
    """What a new instance of the pool is started with: as those that it will exchange KV with were."""
    key, known = model_key(view.target), seen.service.status.model
    like = next(_alike(views, key), None)
    if like is not None:
        return like.spec.model_facts
    return known.facts if known is not None and known.key == key else None


def _wanted(seen: Observed, views: tuple[PoolView, ...]) -> StartSpec | None:
    """What new engines that hold a model are started with, where somebody can read it."""
    real = (view.target for view in views if view.target.engine.type != "Simulated")
    return next(real, None) if seen.reads_models else None


def _alike(views: tuple[PoolView, ...], key: str) -> Iterator[PDInstance]:
    """Instances of this model that stay."""
    return (member for view in views for member in view.new if model_key(member.spec) == key)


def _needs_facts(start: StartSpec) -> bool:
    """Whether there is no engine without: the size of LMCache's buffer follows from the model."""
    transfer = start.kv_transfer
    return transfer is not None and transfer.connector is Connector.LMCACHE and transfer.buffer_size is None


def _in_progress(known: ModelStatus | None, read: Read, reading: Reading, *, now_s: float) -> Outlook:
    """What came of a try, if anything did."""
    ends_s = reading.born_s + (HINDERED_S if reading.hindrance else PATIENCE_S)
    told = {"key": read.key, "attempts": read.attempt, "at": now_s}
    why = reading.error if reading.facts is None else _no_model(reading.facts)
    if reading.facts is not None and why is None:
        return Outlook(status=ModelStatus(facts=reading.facts, **told))
    if why is None and now_s >= ends_s:
        waited = f"the pod that reads it did not end within {now_s - reading.born_s:.0f} s"
        why = f"{waited}: {reading.hindrance}" if reading.hindrance else waited
    if why is None:
        return Outlook(status=known, read=read, deadline_s=ends_s)
    failed = ModelStatus(error=why[:_WORDS], **told)
    return Outlook(status=failed, deadline_s=now_s + pause_s(read.attempt))


def _no_model(excerpt: Mapping[str, Any]) -> str | None:
    """Why this describes no model that is known here; None if it does."""
    try:
        parse_model_config(excerpt)
    except InvalidInput as error:
        return str(error)
    return None
