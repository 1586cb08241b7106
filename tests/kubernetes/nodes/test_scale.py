"""More and fewer engines under constant load."""

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.service import INSTANCES, DeployedService


@pytest.mark.timeout(600)
def test_scaling_4_to_8_to_2_fails_no_request(
    service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    try:
        for instances in (8, 2):
            with load.window(f"scaled to {instances}") as window:
                service.patch("pdservices", {"spec": {"instances": instances}})
                scaled_s = service.wait_until_ready(instances, timeout_s=150)
            record_measurement(f"scaled: {instances} serve after {scaled_s:.1f} s")
            assert window.all_succeeded()
    finally:
        service.patch("pdservices", {"spec": {"instances": INSTANCES}})
        service.wait_until_ready(timeout_s=90)
