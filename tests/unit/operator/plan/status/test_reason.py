"""The column REASON of a service: why it is degraded or not ready."""

import pytest

from fulcrum_core.api import Condition
from fulcrum_operator.plan.status.service import summarize_reason


@pytest.mark.parametrize(
    ("degraded", "ready", "reason"),
    [
        pytest.param(("False", "AsExpected"), ("True", "InstancesServing"), "", id="ready"),
        pytest.param(
            ("False", "AsExpected"), ("False", "TooFewInstances"), "TooFewInstances", id="not ready yet"
        ),
        pytest.param(
            ("True", "ImagePullFailed"), ("False", "TooFewInstances"), "ImagePullFailed", id="the cause"
        ),
        pytest.param(
            ("True", "Unschedulable"), ("True", "InstancesServing"), "Unschedulable", id="ready but degraded"
        ),
    ],
)
def test_the_reason_of_degraded_goes_before_that_of_ready(
    degraded: tuple[str, str], ready: tuple[str, str], reason: str
) -> None:
    found = tuple(
        Condition.model_validate({"type": kind, "status": status, "reason": text})
        for kind, (status, text) in (("Ready", ready), ("Degraded", degraded))
    )
    assert summarize_reason(found) == reason
