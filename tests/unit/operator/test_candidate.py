"""An operator process is healthy without an API server, and exits when leader election ends."""

import asyncio
from functools import partial
from typing import Any

import pytest

from fulcrum_cluster.leader_election import LeaderElector
from fulcrum_cluster.objects import ObjectKind
from fulcrum_core.errors import StoreUnavailable
from fulcrum_operator.arguments import make_parser
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_operator.program import Candidate, make_elector
from tests.waiting import advance

pytestmark = pytest.mark.looptime

ARGS = ["--image", "i", "--lease-namespace", "fulcrum", "--identity", "operator-0", "--token-file", "/t"]


class FailingLeases:
    """An API server that fails every request for a Lease."""

    def __init__(self, failure: Exception) -> None:
        self.failure, self.requested = failure, set[str]()

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> dict[str, Any]:
        self.requested.add(f"{namespace}/{name}")
        raise self.failure


def candidate(leases: FailingLeases, stop: asyncio.Event, *more: str) -> Candidate[LeaderElector]:
    cluster: Any = None
    lease: Any = leases
    args = make_parser().parse_args([*ARGS, *more])
    return Candidate(cluster, partial(make_elector, lease, args), args, Metrics(), stop)


async def test_a_candidate_without_an_api_server_waits_and_stays_healthy() -> None:
    stop = asyncio.Event()
    process = candidate(FailingLeases(StoreUnavailable("no response")), stop)
    work = asyncio.get_running_loop().create_task(process.run())
    await advance(600)
    assert (process.unhealthy_reason(), process.unready_reason(), work.done()) == (
        None,
        "the Lease has not been read yet",
        False,
    )
    stop.set()
    assert await work == 0


async def test_a_candidate_whose_election_ends_is_unhealthy_and_exits_with_1() -> None:
    stop = asyncio.Event()
    process = candidate(FailingLeases(KeyError("metadata")), stop)
    assert (await process.run(), process.unhealthy_reason()) == (
        1,
        "the Lease was lost or leader election has ended",
    )


async def test_operators_of_two_releases_in_one_namespace_use_two_leases() -> None:
    requested = set[str]()
    for release in ("a-fulcrum-operator", "b-fulcrum-operator"):
        leases = FailingLeases(KeyError("metadata"))
        await candidate(leases, asyncio.Event(), "--service-account", release).run()
        requested |= leases.requested
    assert requested == {"fulcrum/a-fulcrum-operator", "fulcrum/b-fulcrum-operator"}
