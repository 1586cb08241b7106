"""Eject serving instances that fail far more often or are far slower than others of the same role.

Error rates are compared among all instances of a role, speeds only within a pool: another pool may have other
hardware. `policy.faults.outliers` has the rules; `Fleet.eject_by_judgement` limits how many may be ejected. A
slow instance that is ejected gets the learned models of the instance with the median speed. With its own
models it would be ejected again at the next comparison, whatever its speed is by then. The prober (`engines`)
calls `tick` once a second.
"""

from collections.abc import Callable, Iterable
from itertools import groupby

import structlog

from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.policy.faults.outliers import LegCounts, find_error_outliers, find_slow_outliers

log = structlog.get_logger()

INTERVAL_S = 10.0
"""Seconds between two judgements, as in Envoy."""
MIN_SAMPLES = 8
"""Measurements without which an instance's speed is not judged."""
_PROMPT_TOKENS, _BATCH_TOKENS = 1_000, 10_000
"""Work for which the speeds of instances are compared."""
ERROR_RATE, LATENCY = "error_rate", "latency"
"""Reasons of ejections."""


class OutlierDetector:
    """Judges the serving instances of a fleet once in `INTERVAL_S`.

    Args:
        fleet: Instances to judge.
        on_ejection: Called with an instance that was ejected, and the reason as a metric label.
    """

    def __init__(self, fleet: Fleet, *, on_ejection: Callable[[Instance, str], None]) -> None:
        self._fleet, self._on_ejection = fleet, on_ejection
        self._next_s = 0.0

    def tick(self, now_s: float) -> None:
        """If the interval has passed, judge the serving instances, then set the leg counts of all to 0."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        serving = [instance for instance in self._fleet.instances if instance.serving]
        for role in Role:
            same_role = [instance for instance in serving if instance.role is role]
            self._judge_errors(same_role, now_s)
            for _, pool in groupby(sorted(same_role, key=_get_pool), key=_get_pool):
                self._judge_speed(role, list(pool), now_s)
        for instance in self._fleet.instances:
            instance.health.answered = instance.health.failed = 0

    def _judge_errors(self, instances: Iterable[Instance], now_s: float) -> None:
        counts = [LegCounts(i.name, i.health.answered, i.health.failed) for i in instances]
        for name in find_error_outliers(counts):
            self._eject(self._fleet[name], ERROR_RATE, now_s)

    def _judge_speed(self, role: Role, instances: list[Instance], now_s: float) -> None:
        """Judge instances of one pool and role: the same model, engine and hardware."""
        phase = 0 if role is Role.PREFILL else 1
        seconds = {i.name: _read_speed(i, role) for i in instances if i.samples[phase] >= MIN_SAMPLES}
        for name in find_slow_outliers(seconds):
            slow, usual = (
                self._fleet[name],
                self._fleet[sorted(seconds, key=seconds.__getitem__)[len(seconds) // 2]],
            )
            if self._eject(slow, LATENCY, now_s):
                slow.start_from(usual.prefill_model, usual.decode_model)

    def _eject(self, instance: Instance, reason: str, now_s: float) -> bool:
        if not self._fleet.eject_by_judgement(instance, reason, now_s=now_s):
            return False
        self._on_ejection(instance, reason)
        return True


def _get_pool(instance: Instance) -> str:
    return instance.pool


def _read_speed(instance: Instance, role: Role) -> float:
    if role is Role.PREFILL:
        return instance.prefill_model.ttft_s(_PROMPT_TOKENS)
    return instance.decode_model.itl_s(_BATCH_TOKENS)
