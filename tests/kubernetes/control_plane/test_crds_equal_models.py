"""Every rule is enforced twice: what a model accepts an API server accepts, and nothing else."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulcrum_cluster.client import ClusterClient, open_cluster
from fulcrum_cluster.objects import Object, kind_of_resource
from fulcrum_core.api import KINDS, Resource, parse_object
from fulcrum_core.errors import InvalidInput
from tests.kubernetes.control_plane.near_valid_documents import documents, near_valid_documents
from tools.kubernetes.cluster import Cluster as RealCluster

AT_ONCE = 16
CONNECTIONS = 8
"""No program of ours asks more than 100 times a second over one."""
ASKED = 600
EXAMPLES, IN_EXAMPLE = 20, 10

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def by_model(document: Object) -> str:
    """What the model says: "accepted", or why not."""
    try:
        parse_object(document)
    except InvalidInput as refused:
        return f"refused: {refused}"
    return "accepted"


class Server:
    """What the API server says of documents of one kind, without storing them."""

    def __init__(
        self, kind: type[Resource], clusters: Sequence[ClusterClient], runner: asyncio.Runner
    ) -> None:
        self.said: Counter[str] = Counter()
        self._kind, self._runner = kind_of_resource(kind), runner
        self._clusters = itertools.cycle(clusters)

    def differences(self, made: Iterable[Object]) -> list[tuple[Object, str, str]]:
        """Documents of which model and server do not think the same, with what each says."""
        judged = self._runner.run(self._all(tuple(made)))
        return [
            (document, model, server)
            for document, server in judged
            if (model := by_model(document)).partition(":")[0] != server.partition(":")[0]
        ]

    async def _all(self, made: tuple[Object, ...]) -> list[tuple[Object, str]]:
        turn = asyncio.Semaphore(AT_ONCE)

        async def ask(document: Object) -> tuple[Object, str]:
            async with turn:
                return document, await self._ask(document)

        return await asyncio.gather(*map(ask, made))

    async def _ask(self, document: Object) -> str:
        said = "accepted"
        try:
            await next(self._clusters).objects.create(self._kind, document, namespace="default", dry_run=True)
        except InvalidInput as refused:
            said = f"refused: {refused}"
        self.said[said.partition(":")[0]] += 1
        return said


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture
def server(kind: type[Resource], control_plane: RealCluster, runner: asyncio.Runner) -> Iterator[Server]:
    clusters = [open_cluster(f"kubeconfig:{control_plane.kubeconfig}") for _ in range(CONNECTIONS)]
    yield Server(kind, clusters, runner)
    for cluster in clusters:
        runner.run(cluster.aclose())


@every_kind
def test_model_and_api_server_agree_on_each_rule_of_each_field(
    kind: type[Resource], server: Server, seed: int
) -> None:
    every = tuple(near_valid_documents(kind))
    asked = random.Random(seed).sample(every, min(len(every), ASKED))  # all of them take minutes
    assert server.differences(asked) == []
    assert min(server.said["accepted"], server.said["refused"]) > 20, server.said


@every_kind
def test_model_and_api_server_agree_on_random_documents(kind: type[Resource], server: Server) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.lists(documents(kind), min_size=1, max_size=IN_EXAMPLE))
    def alike(made: list[Object]) -> None:
        assert server.differences(made) == []

    alike()
    assert server.said["refused"] > 0, server.said
