"""One operator process of several: what it says of itself without an API server, and without its Lease."""

import asyncio
from typing import Any

import pytest

from fulcrum_cluster.objects import ObjectKind
from fulcrum_core.errors import StoreUnavailable
from fulcrum_operator.__main__ import Candidate, _parser
from fulcrum_operator.kubernetes.metrics import Meters

pytestmark = pytest.mark.looptime

ARGS = ["--image", "i", "--lease-namespace", "fulcrum", "--identity", "operator-0", "--token-file", "/t"]


class Leases:
    """Where the Lease would be, if anything answered."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    async def get(self, _kind: ObjectKind, _name: str, *, namespace: str) -> dict[str, Any]:
        del namespace
        raise self.failure


def candidate(failure: Exception, stop: asyncio.Event) -> Candidate:
    cluster: Any = None
    lease: Any = Leases(failure)
    return Candidate(cluster, lease, _parser().parse_args(ARGS), Meters(), stop)


async def test_who_is_started_without_an_api_server_waits_for_it_and_is_not_started_again() -> None:
    stop = asyncio.Event()
    standing = candidate(StoreUnavailable("away"), stop)
    work = asyncio.get_running_loop().create_task(standing.run())
    await asyncio.sleep(600)
    assert (standing.dead(), standing.unready(), work.done()) == (None, "has not seen the lease", False)
    stop.set()
    assert await work == 0


async def test_who_stands_for_election_no_more_ends_with_an_error() -> None:
    stop = asyncio.Event()
    standing = candidate(KeyError("metadata"), stop)
    assert (await standing.run(), standing.dead()) == (1, "stands for election no more")
