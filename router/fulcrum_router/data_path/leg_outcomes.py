"""Record how the legs of one request ended, and blame a 5xx on the engine only if another engine disagrees.

A request that engines answer with 5xx could otherwise eject one after another: the same 5xx from a second
engine is the request's fault. Until another engine has answered, dispatch only prefers other instances.

A 4xx goes to the client. But an engine that rejects everything is always free, and so would get everything.
So another engine is asked about some of the requests that such an engine rejects.

The legs of `prefill`, `decode` and `pass_through` report to it, and it reports to the router, whose `Health`
ejects. It sends nothing: whether another engine is asked is the journey's decision.
"""

from collections.abc import Mapping
from typing import Any

from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.http1.remote_media import has_remote_media
from fulcrum_router.policy.faults.blame import Blame, is_ambiguous, is_rejection
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

    def doubts_rejection(self, instance: Instance) -> bool:
        """Whether to fail a leg that `instance` rejects, so that another engine is asked; at most one is."""
        return self._suspects is None and self._router.doubts_rejection(instance)

    def record_rejection(self, instance: Instance, phase: str) -> None:
        """Count a leg that was rejected, and whose response goes to the client."""
        self._router.record_rejection(instance, phase)

    def record_failure(
        self, instance: Instance, phase: str, failed: LegFailed, *, fields: Mapping[str, Any]
    ) -> None:
        """Count a failed leg of a request with these fields.

        A failure that another engine's answer could explain is kept until then. If the request has media by
        URL, it counts as the client's at once: engines may have been sent different files.
        """
        failed.__traceback__ = None  # its frames refer to the request, which would be garbage in a cycle
        failure, status = failed.failure, failed.status
        if is_ambiguous(failure, status) and has_remote_media(fields):
            self._router.record_client_failure(instance, phase, failed)
            return
        if not is_ambiguous(failure, status) and not is_rejection(failure, status):
            self._router.record_leg_failure(instance, phase, failed)
            return
        self._router.record_unexplained_failure(instance, phase, failed)
        if self._suspects is None:
            self._suspects = []
        self._suspects.append((instance, phase, failed))

    def close(self) -> None:
        """Count the failures that no other engine explained: those of several engines are the client's."""
        if self._suspects is not None:
            several = len(self._suspects) > 1
            for _, phase, failed in self._suspects:
                blame = Blame.CLIENT if several or failed.status < 500 else Blame.ENGINE
                self._router.counters.leg_failures[phase, blame] += 1
            self._suspects = None
