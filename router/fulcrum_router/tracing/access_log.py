"""The access log: a line of JSON for a share of the requests, in ids and numbers and without any text.

`exchange` and `pass_through` ask `takes_next` and write a line at the end of a request. Traces are
`request_trace`'s.
"""

import structlog

log = structlog.get_logger()


class AccessLog:
    """Chooses the requests that are logged, evenly spread, and logs them."""

    __slots__ = ("_due", "share")

    def __init__(self) -> None:
        self.share = 0.0
        """Share of the requests that are logged."""
        self._due = 0.0

    def takes_next(self) -> bool:
        """Whether the request that ends now is logged."""
        self._due += self.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    @staticmethod
    def write(
        *, request_id: bytes, path: bytes, tier: str, tenant: str, outcome: str, **numbers: object
    ) -> None:
        """Log one request; of `numbers` those that are None are left out."""
        known = {name: value for name, value in numbers.items() if value is not None}
        log.info(
            "request ended",
            request_id=request_id.decode("latin-1"),
            path=path.decode("latin-1"),
            tier=tier,
            tenant=tenant,
            outcome=outcome,
            **known,
        )
