"""The exception that legs raise; `policy.faults.failures` has the causes."""

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
