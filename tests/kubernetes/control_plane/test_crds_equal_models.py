"""The CRDs and the Pydantic models accept exactly the same documents."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
"""A client sends at most 100 requests a second over one connection."""
SAMPLE_SIZE = 600
EXAMPLES, IN_EXAMPLE = 20, 10

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


class Verdict(NamedTuple):
    """Whether a document was accepted, and the refusal's text."""

    accepted: bool
    message: str = ""


def validate_with_model(document: Object) -> Verdict:
    """Validate a document with the Pydantic model of its kind."""
    try:
        parse_object(document)
    except InvalidInput as error:
        return Verdict(False, str(error))
    return Verdict(True)


class Server:
    """Validates documents of one kind with the API server, without storing them; counts the verdicts."""

    def __init__(
        self, kind: type[Resource], clusters: Sequence[ClusterClient], runner: asyncio.Runner
    ) -> None:
        self.verdicts: Counter[bool] = Counter()
        self._kind, self._runner = kind_of_resource(kind), runner
        self._clusters = itertools.cycle(clusters)

    def differences(self, candidates: Iterable[Object]) -> list[tuple[Object, Verdict, Verdict]]:
        """Documents that only one of model and server accepts, with the verdicts of both."""
        validated = self._runner.run(self._validate_all(tuple(candidates)))
        return [
            (document, model, server)
            for document, server in validated
            if (model := validate_with_model(document)).accepted != server.accepted
        ]

    async def _validate_all(self, candidates: tuple[Object, ...]) -> list[tuple[Object, Verdict]]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def validate(document: Object) -> tuple[Object, Verdict]:
            async with slots:
                return document, await self._validate(document)

        return await asyncio.gather(*map(validate, candidates))

    async def _validate(self, document: Object) -> Verdict:
        verdict = Verdict(True)
        try:
            await next(self._clusters).objects.create(self._kind, document, namespace="default", dry_run=True)
        except InvalidInput as error:
            verdict = Verdict(False, str(error))
        self.verdicts[verdict.accepted] += 1
        return verdict


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
    sample = random.Random(seed).sample(every, min(len(every), SAMPLE_SIZE))  # all of them take minutes
    assert server.differences(sample) == []
    assert min(server.verdicts[True], server.verdicts[False]) > 20, server.verdicts


@every_kind
def test_model_and_api_server_agree_on_random_documents(kind: type[Resource], server: Server) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.lists(documents(kind), min_size=1, max_size=IN_EXAMPLE))
    def agree(candidates: list[Object]) -> None:
        assert server.differences(candidates) == []

    agree()
    assert server.verdicts[False] > 0, server.verdicts
