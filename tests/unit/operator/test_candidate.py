"""One operator process of several: what it says of itself without an API server, and without its Lease."""

import asyncio
from typing import Any

import pytest

from fulcrum_cluster.objects import ObjectKind
from fulcrum_core.errors import StoreUnavailable
from fulcrum_operator.__main__ import Candidate, _parser
from fulcrum_operator.controller.metrics import Meters

pytestmark = pytest.mark.looptime

ARGS = ["--image", "i", "--lease-namespace", "fulcrum", "--identity", "operator-0", "--token-file", "/t"]


class Leases:
    """Where the Lease would be, if anything answered."""

    def __init__(self, failure: Exception) -> None:
        self.failure, self.asked = failure, set[str]()

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> dict[str, Any]:
        self.asked.add(f"{namespace}/{name}")
        raise self.failure


def candidate(leases: Leases, stop: asyncio.Event, *args: str) -> Candidate:
    cluster: Any = None
    lease: Any = leases
    return Candidate(cluster, lease, _parser().parse_args([*ARGS, *args]), Meters(), stop)


async def test_who_is_started_without_an_api_server_waits_for_it_and_is_not_started_again() -> None:
    stop = asyncio.Event()
    standing = candidate(Leases(StoreUnavailable("away")), stop)
    work = asyncio.get_running_loop().create_task(standing.run())
    await asyncio.sleep(600)
    assert (standing.dead(), standing.unready(), work.done()) == (None, "has not seen the lease", False)
    stop.set()
    assert await work == 0


async def test_who_stands_for_election_no_more_ends_with_an_error() -> None:
    stop = asyncio.Event()
    standing = candidate(Leases(KeyError("metadata")), stop)
    assert (await standing.run(), standing.dead()) == (1, "stands for election no more")


async def test_operators_of_two_releases_in_one_namespace_do_not_wait_for_each_other() -> None:
    asked = set[str]()
    for release in ("a-fulcrum-operator", "b-fulcrum-operator"):
        leases = Leases(KeyError("metadata"))
        await candidate(leases, asyncio.Event(), "--account", release).run()
        asked |= leases.asked
    assert asked == {"fulcrum/a-fulcrum-operator", "fulcrum/b-fulcrum-operator"}
