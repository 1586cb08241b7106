"""The lease check: may a late response be forwarded, or was its KV fetched after the lease had expired?

An expired lease does not show in the response, whose tokens may then belong to another prompt. So the prefill
instances are asked whether any transfer has expired, while `DecodeResponse` withholds what it receives. A
decode leg starts the check; the result goes to `DecodeResponse.finish_lease_check`, and a retry is the
journey's decision.
"""

import structlog

from fulcrum_router.data_path.decode_response import DecodeResponse
from fulcrum_router.fleet.engine_metrics import fetch_expired_transfers

log = structlog.get_logger()


async def check_kv_leases(response: DecodeResponse) -> None:
    """Query the sources of the late transfers; forward the withheld response if no transfer has expired.

    The leg fails if a source counts another number of expired transfers than before its prefill leg, or does
    not respond; no further source is queried then, since the client waits. It also fails, without any query,
    if the cache salt was rotated since the leg was sent.
    """
    instance = response.instance
    expired_by_source: dict[str, float | None] = {}
    kv_valid = response.cache_salt == instance.cache_salt
    late = response.find_late_transfers() if kv_valid else []
    for transfer in late:
        source = transfer.source
        if source.name not in expired_by_source:
            expired_by_source[source.name] = await fetch_expired_transfers(source)
        expired = expired_by_source[source.name]
        kv_valid = expired is not None and expired == transfer.expired_before
        if not kv_valid:
            break
    if late:
        log.warning(
            "response later than the KV lease",
            decode=instance.name,
            late_transfers=len(late),
            kv_valid=kv_valid,
            expired=expired_by_source,
        )
    response.finish_lease_check(kv_valid=kv_valid)
