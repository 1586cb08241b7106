"""Record how the legs of one request ended, and blame a 5xx on the engine only if another engine disagrees.

A request that engines answer with 5xx could otherwise eject one after another: the same 5xx from a second
engine is the request's fault. Until another engine has answered, dispatch only prefers other instances.
"""

from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.policy.blame import Blame, is_ambiguous
from fulcrum_router.router import Router


class LegOutcomes:
    """The ended legs of one request."""

    __slots__ = ("_router", "_suspects")

    def __init__(self, router: Router) -> None:
        self._router = router
        self._suspects: list[tuple[Instance, str, LegFailed]] | None = None
        """Legs whose failure is not explained yet, with their phases; made when there is one."""

    def record_success(self, instance: Instance, phase: str) -> None:
        """Count a leg that got its response; what failed elsewhere was not the request's fault."""
        router = self._router
        router.record_leg_success(instance, phase)
        if self._suspects is not None:
            suspects, self._suspects = self._suspects, None
            for suspect, failed_phase, failed in suspects:
                if suspect is not instance:
                    router.blame_engine(suspect, failed_phase, failed)

    def record_failure(self, instance: Instance, phase: str, failed: LegFailed) -> None:
        """Count a failed leg."""
        if not is_ambiguous(failed.failure, failed.status):
            self._router.record_leg_failure(instance, phase, failed)
            return
        self._router.record_unexplained_failure(instance, phase, failed)
        if self._suspects is None:
            self._suspects = []
        self._suspects.append((instance, phase, failed))

    def close(self) -> None:
        """Count the failures that no other engine explained: those of several engines are the client's."""
        if self._suspects is not None:
            blame = Blame.CLIENT if len(self._suspects) > 1 else Blame.ENGINE
            for _, phase, _ in self._suspects:
                self._router.counters.leg_failures[phase, blame] += 1
            self._suspects = None
