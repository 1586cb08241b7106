"""The exception with which a leg or a connection to an engine fails: the failure, and a status if it has one.

`upstream` and the legs raise it, and the legs report it to the journey. `policy.faults.failures` has the
causes.
"""

from fulcrum_router.policy.faults.failures import Failure

__all__ = ["Failure", "LegFailed"]


class LegFailed(Exception):
    """A leg that ended without a usable response. `status` is the engine's HTTP status, 0 if it sent none."""

    def __init__(
        self, failure: Failure, detail: str, *, status: int = 0, may_have_started: bool = True
    ) -> None:
        super().__init__(detail)
        self.failure, self.detail, self.status = failure, detail, status
        self.may_have_started = may_have_started
        """Whether the engine may have started the request, and so may have fetched the prompt's KV."""
