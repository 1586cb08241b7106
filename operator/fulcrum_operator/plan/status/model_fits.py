"""The condition ModelFits: the model fits the hardware of every pool.

The estimate is that of `fulcrum plan`, from the model's config.json if it could be read. Observations have
precedence: an engine that serves has loaded its model, and an engine that was killed for its memory has not.
The condition is information only: engines are started whatever it says.
"""

from fulcrum_core.api import Condition, LaunchSpec, PDInstance, conditions
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.models import MODEL_UNKNOWN, Fit
from fulcrum_operator.plan.instance_state import revision_of
from fulcrum_operator.plan.model import model_key
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.rollout import PoolView
from fulcrum_operator.plan.status.condition import make_condition

_WORST_FIRST = ("False", "Unknown", "True")


def model_fits(observed: Observed, pools: tuple[tuple[PoolView, tuple[PDInstance, ...]], ...]) -> Condition:
    """The condition ModelFits of a service, given its pools with their members."""
    real = [(view, members) for view, members in pools if not view.target.engine.is_simulated]
    if not real:
        message = "simulated engines load no model"
        return make_condition(
            observed.service, conditions.MODEL_FITS, "Unknown", conditions.NOT_APPLICABLE, message
        )
    fits = [(view.name, _pool_fit(observed, view, members)) for view, members in real]
    worst = min((fit.status for _, fit in fits), key=_WORST_FIRST.index)
    named = [(name, fit) for name, fit in fits if fit.status == worst]
    message = "; ".join(f"pool {name}: {fit.message}" for name, fit in named)
    return make_condition(observed.service, conditions.MODEL_FITS, worst, named[0][1].reason, message)


def _pool_fit(observed: Observed, view: PoolView, members: tuple[PDInstance, ...]) -> Fit:
    """Verdict for one pool, from its instances of the target revision."""
    updated = [member for member in members if revision_of(member) == view.revision]
    estimate = next(
        (fit for member in updated if (fit := _estimated_fit(observed, member)) is not None), None
    )
    has_served = any(member.status.identity is not None for member in updated) or _was_last_good(view)
    if has_served and not (estimate and estimate.status == "True"):
        return Fit(status="True", reason=conditions.LOADED, message="its engines have loaded the model")
    out_of_memory = (
        None
        if has_served
        else next((why for member in updated if (why := _out_of_memory(observed, member))), None)
    )
    if out_of_memory is not None:
        return Fit(status="False", reason=conditions.OUT_OF_MEMORY, message=out_of_memory)
    if estimate is None:
        return _fit_without_instance(observed, view)
    return (
        _config_not_read(_why_not_read(observed, view.target))
        if estimate.reason == MODEL_UNKNOWN
        else estimate
    )


def _fit_without_instance(observed: Observed, view: PoolView) -> Fit:
    """Verdict for a pool without an estimate: none of its instances has started."""
    known = _model_status(observed, view.target)
    if known is not None and known.error is not None:
        return _config_not_read(known.error)
    reading = observed.can_read_models and known is None
    message = "the model's config.json is being read" if reading else "no instance has started yet"
    return Fit(status="Unknown", reason=conditions.NO_INSTANCE_YET, message=message)


def _config_not_read(why: str) -> Fit:
    message = f"the model's config.json was not read: {why}"
    return Fit(status="Unknown", reason=MODEL_UNKNOWN, message=message)


def _why_not_read(observed: Observed, launch_spec: LaunchSpec) -> str:
    known = _model_status(observed, launch_spec)
    if known is not None and known.error is not None:
        return known.error
    return f"{_describe_location(launch_spec)}; run fulcrum plan --model-config to check it"


def _model_status(observed: Observed, launch_spec: LaunchSpec) -> ModelStatus | None:
    known = observed.service.status.model
    return known if known is not None and known.key == model_key(launch_spec) else None


def _estimated_fit(observed: Observed, instance: PDInstance) -> Fit | None:
    facts = observed.engine_facts.get(instance.metadata.name)
    return facts.fit if facts else None


def _was_last_good(view: PoolView) -> bool:
    last_good = view.pool.status.last_good
    return last_good is not None and last_good.launch_revision == view.revision


def _out_of_memory(observed: Observed, instance: PDInstance) -> str | None:
    engine = observed.engines.get(instance.metadata.name)
    if engine is None or not engine.out_of_memory:
        return None
    return f"{instance.metadata.name} used more memory than its limit: {engine.exit_reason}"


def _describe_location(launch_spec: LaunchSpec) -> str:
    """Where the model is, for the message that its config.json was not read."""
    source = launch_spec.model_source
    if source is not None and source.pvc is not None:
        return f"it is in the claim {source.pvc}"
    if source is not None and source.host_path is not None:
        return "it is on the nodes"
    return "it is at the hub"
