"""What the objects of a manifest must be, each and together."""

from typing import Any

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_operator.plan.references import check_objects, check_references
from tests.unit.operator.builders import pool, service, tier


@pytest.mark.parametrize(
    ("check", "objects", "line"),
    [
        pytest.param(
            check_references,
            [service(qosTiers=["gold"]), tier("free")],
            "PDService chat spec.qosTiers[0] (gold) is not the name of a QoSTier of this manifest",
            id="a tier that nobody wrote",
        ),
        pytest.param(
            check_objects,
            [service(), service()],
            "PDService metadata.name (chat) is in the manifest twice",
            id="twice the same",
        ),
        pytest.param(
            check_objects,
            [service(), pool(replicas=2)],
            "kind (PDPool) is made by the operator: write a PDService",
            id="what is made from a service",
        ),
    ],
)
def test_inconsistent_manifest_is_refused(check: Any, objects: Any, line: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(objects)
    assert str(refused.value) == line


def test_tiers_may_be_anywhere_in_the_manifest() -> None:
    check_references([service(qosTiers=["gold", "free"]), tier("gold"), tier("free")])
