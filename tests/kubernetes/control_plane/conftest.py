"""Level 3: a namespace on the control plane for each test."""

from collections.abc import Iterator

import pytest

from tests.kubernetes.clusters import fresh_namespace
from tools.kubernetes.cluster import Cluster


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A fresh namespace on the control plane, deleted after the test."""
    with fresh_namespace(control_plane) as name:
        yield name
