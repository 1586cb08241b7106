"""Whether the model fits the hardware that its pools ask for: ModelFits.

What `fulcrum plan` works out before anything is applied is said here in the same words, from the model's
config.json where it can be read. What is seen counts for more: an engine that serves has room for its model,
and one that was killed for its memory has not. Nothing waits for this condition: an engine is started all
the same.
"""

from fulcrum_core.api import Condition, PDInstance, StartSpec
from fulcrum_core.api import conditions as words
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.models import MODEL_UNKNOWN, Fit
from fulcrum_operator.plan.model import model_key
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.rollout import PoolView, revision_of
from fulcrum_operator.plan.status.condition import condition

_OOM_KILLED = "OOMKilled"
"""How a kernel's kill for want of memory is called in the end of a container."""
_WORST_FIRST = ("False", "Unknown", "True")


def model_fits(seen: Observed, pools: tuple[tuple[PoolView, tuple[PDInstance, ...]], ...]) -> Condition:
    """The condition of a service with these pools and their instances as they shall stand."""
    real = [(view, members) for view, members in pools if view.target.engine.type != "Simulated"]
    if not real:
        told = "simulated engines hold no model"
        return condition(seen.service, words.MODEL_FITS, "Unknown", words.NOT_APPLICABLE, told)
    fits = [(view.name, _fit(seen, view, members)) for view, members in real]
    worst = min((fit.verdict for _, fit in fits), key=_WORST_FIRST.index)
    named = [(name, fit) for name, fit in fits if fit.verdict == worst]
    message = "; ".join(f"pool {name}: {fit.message}" for name, fit in named)
    return condition(seen.service, words.MODEL_FITS, worst, named[0][1].reason, message)


def _fit(seen: Observed, view: PoolView, members: tuple[PDInstance, ...]) -> Fit:
    """Of one pool, by the instances of the revision that it shall have."""
    new = [member for member in members if revision_of(member) == view.revision]
    judged = next((fit for member in new if (fit := _judged(seen, member)) is not None), None)
    served = any(member.status.identity is not None for member in new) or _was_good(view)
    if served and not (judged and judged.verdict == "True"):
        return Fit(verdict="True", reason=words.LOADED, message="its engines have loaded the model")
    killed = None if served else next((why for member in new if (why := _killed(seen, member))), None)
    if killed is not None:
        return Fit(verdict="False", reason=words.OUT_OF_MEMORY, message=killed)
    if judged is None:
        return _before_any(seen, view)
    return _unread(_why_unread(seen, view.target)) if judged.reason == MODEL_UNKNOWN else judged


def _before_any(seen: Observed, view: PoolView) -> Fit:
    """Of a pool without an instance."""
    known = _read_of(seen, view.target)
    if known is not None and known.error is not None:
        return _unread(known.error)
    reading = seen.reads_models and known is None
    message = "the model's config.json is being read" if reading else "no instance was started yet"
    return Fit(verdict="Unknown", reason=words.NO_INSTANCE_YET, message=message)


def _unread(why: str) -> Fit:
    message = f"the model's config.json was not read: {why}"
    return Fit(verdict="Unknown", reason=MODEL_UNKNOWN, message=message)


def _why_unread(seen: Observed, start: StartSpec) -> str:
    known = _read_of(seen, start)
    if known is not None and known.error is not None:
        return known.error
    return f"{_place(start)}; fulcrum plan --model-config can judge it"


def _read_of(seen: Observed, start: StartSpec) -> ModelStatus | None:
    known = seen.service.status.model
    return known if known is not None and known.key == model_key(start) else None


def _judged(seen: Observed, instance: PDInstance) -> Fit | None:
    facts = seen.facts.get(instance.metadata.name)
    return facts.fit if facts else None


def _was_good(view: PoolView) -> bool:
    good = view.pool.status.last_good
    return good is not None and good.start_revision == view.revision


def _killed(seen: Observed, instance: PDInstance) -> str | None:
    engine = seen.engines.get(instance.metadata.name)
    ended = (engine and engine.exit_reason) or ""
    return f"{instance.metadata.name} took more memory than it has: {ended}" if _OOM_KILLED in ended else None


def _place(start: StartSpec) -> str:
    """Where the model is, that nobody but the engines reads it there."""
    source = start.model_source
    if source is not None and source.pvc is not None:
        return f"it is in the claim {source.pvc}"
    if source is not None and source.host_path is not None:
        return "it is on the nodes"
    return "it is at the hub"
