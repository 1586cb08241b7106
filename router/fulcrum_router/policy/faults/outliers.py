"""Find the instances that fail more often, or are slower, than others of the same kind.

An instance is judged against its peers: if all fail, the requests or the service are the cause, and ejecting
instances would help nobody. With five instances or more the rule is Envoy's success-rate outlier: a success
rate below the mean by more than 1.9 standard deviations. Fewer instances have no meaningful deviation: more
than half of the legs must have failed, and more than twice the share of the best peer.

Ejection is limited here as well: never the last serving instance of a role, and at most half of them.
`observe.outliers` calls these functions with what the router has counted, and ejects.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import NamedTuple

MIN_LEGS = 20
"""Legs in an interval below which an instance is not judged."""
MIN_ERROR_SHARE = 0.1
"""Share of failed legs below which no instance is an outlier: the deviation of equal rates is tiny."""
_MIN_INSTANCES, _STDEV_FACTOR = 5, 1.9
"""Envoy's success_rate_minimum_hosts and success_rate_stdev_factor."""
_FAILURE_SHARE, _PEER_FACTOR = 0.5, 2.0
SLOW_FACTOR = 5.0
"""Multiple of the median of the peers above which an instance is a latency outlier."""
_MIN_PEERS = 2
MAX_EJECTED_SHARE = 0.5
"""Largest share of the instances of a role that is ejected by judgement."""


class LegCounts(NamedTuple):
    """Legs of one instance that ended in an interval."""

    name: str
    answered: int
    failed: int

    @property
    def error_share(self) -> float:
        """Share of the legs that failed."""
        return self.failed / (self.answered + self.failed)


def find_error_outliers(counts: Sequence[LegCounts]) -> list[str]:
    """List the instances that fail far more often than their peers, the worst first.

    Instances with fewer than `MIN_LEGS` legs are not judged; a share below `MIN_ERROR_SHARE` is no outlier.
    """
    judged = [count for count in counts if count.answered + count.failed >= MIN_LEGS]
    suspects = [count for count in judged if count.error_share >= MIN_ERROR_SHARE]
    if len(judged) < 2 or not suspects:
        return []
    shares = [count.error_share for count in judged]
    if len(judged) >= _MIN_INSTANCES:
        bound = fmean(shares) + _STDEV_FACTOR * pstdev(shares)
    else:
        bound = max(_FAILURE_SHARE, _PEER_FACTOR * min(shares))
    outliers = [count for count in suspects if count.error_share > bound]
    return [count.name for count in sorted(outliers, key=lambda c: (-c.error_share, c.name))]


def find_slow_outliers(seconds: Mapping[str, float]) -> list[str]:
    """List the instances that need `SLOW_FACTOR` times the median time of their peers for the same work.

    With fewer than two peers nothing is listed. The slowest comes first.
    """
    found = []
    for name, own_s in seconds.items():
        peers = [peer_s for peer, peer_s in seconds.items() if peer != name]
        if len(peers) >= _MIN_PEERS and own_s >= SLOW_FACTOR * median(peers) > 0.0:
            found.append(name)
    return sorted(found, key=lambda name: (-seconds[name], name))


def may_eject(*, serving: int, ejected: int) -> bool:
    """Whether one more of the serving instances of a role may be ejected by judgement."""
    return serving > 1 and ejected + 1 <= MAX_EJECTED_SHARE * (serving + ejected)
