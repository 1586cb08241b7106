"""A manifest may contain only PDServices and QoSTiers, each once, and must contain the tiers it names."""

from typing import Any

import pytest

from fulcrum_cli.manifest_files import check_objects, check_references
from fulcrum_core.errors import InvalidInput
from tests.unit.operator.builders import pool, service, tier


@pytest.mark.parametrize(
    ("check", "objects", "line"),
    [
        pytest.param(
            check_references,
            [service(qosTiers=["gold"]), tier("free")],
            "PDService chat spec.qosTiers[0] (gold) is not the name of a QoSTier in this manifest",
            id="a tier that is not in the manifest",
        ),
        pytest.param(
            check_objects,
            [service(), service()],
            "PDService metadata.name (chat) is in the manifest twice",
            id="the same object twice",
        ),
        pytest.param(
            check_objects,
            [service(), pool(replicas=2)],
            "kind (PDPool) is created by the operator: write a PDService",
            id="a kind that the operator creates",
        ),
    ],
)
def test_inconsistent_manifest_is_refused(check: Any, objects: Any, line: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(objects)
    assert str(refused.value) == line


def test_tiers_may_be_anywhere_in_the_manifest() -> None:
    check_references([service(qosTiers=["gold", "free"]), tier("gold"), tier("free")])
