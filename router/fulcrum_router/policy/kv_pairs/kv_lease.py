"""Deadlines of a KV transfer, derived from the KV lease of its prefill instance. Times are seconds.

A prefill engine keeps the KV of a prompt until the lease has expired. A decode engine that fetches it later
gets another prompt's KV and no error. All clocks here are the router's. The lease starts when the prefill
engine sends its response; an age is the time since that response arrived. Journeys, `verification` and
`incoming_transfers` compare ages with them; what happens to a late transfer is decided there.
"""

_USABLE_FRACTION = 1 / 2
_ON_TIME_FRACTION = 5 / 6
_MAX_RESPONSE_DELAY_S = 1.0
"""Longest time that a prefill response may have been in transit."""
_FRACTION_AFTER_RENEWAL = 1 / 2


def max_usable_age_s(lease_s: float) -> float:
    """Age up to which KV transfer parameters are still sent to a decode instance.

    The other half of the lease is for the queue of the decode instance.
    """
    return _USABLE_FRACTION * lease_s


def max_on_time_age_s(lease_s: float) -> float:
    """Age up to which the first byte of the decode response shows that the KV was fetched in time."""
    return min(_ON_TIME_FRACTION * lease_s, lease_s - _MAX_RESPONSE_DELAY_S)


def min_renewed_lease_s(lease_s: float) -> float:
    """Time that is left of the lease after a response of the decode engine, at least.

    The decode engine's last heartbeat, at most 1/6 of a lease old, renewed the lease to 2/3: 2/3 - 1/6 = 1/2.
    """
    return _FRACTION_AFTER_RENEWAL * lease_s
