"""How long the drains took that ended in a reconcile, for the operator's metrics.

`leader` calls it with the state before a reconcile and its plan. Drains are planned in `phases`.
"""

from collections.abc import Iterator

from fulcrum_core.api import PDInstance
from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.values import Phase
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.service import Plan

_AFTER_DRAIN = (Phase.SWITCHING, Phase.TERMINATING)
"""Phases after a drain. A cancelled one returns to Serving, a failed engine leads to Failed."""


def list_drain_times(before: Observed, plan: Plan) -> Iterator[float]:
    """Yield the seconds of each drain that the plan ends, drained or at the drain timeout."""
    since_s = {
        instance.metadata.name: instance.status.phase_since
        for instance in before.instances
        if instance.status.phase is Phase.DRAINING and instance.status.reason != DRAINED
    }
    for obj in plan.objects:
        if isinstance(obj, PDInstance) and _has_drained(obj):
            start_s = since_s.get(obj.metadata.name)
            if start_s is not None:
                yield max(0.0, before.now_s - start_s)


def _has_drained(instance: PDInstance) -> bool:
    phase = instance.status.phase
    return phase in _AFTER_DRAIN or (phase is Phase.DRAINING and instance.status.reason == DRAINED)
