"""More engines and fewer, under a steady load."""

import pytest

from tests.conftest import Figure
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.service import INSTANCES, Service


@pytest.mark.timeout(600)
def test_scaling_4_to_8_to_2_fails_no_request(service: Service, load: Load, figure: Figure) -> None:
    try:
        for instances in (8, 2):
            with load.window(f"scaled to {instances}") as seen:
                service.patch("pdservices", {"spec": {"instances": instances}})
                scaled_s = service.wait_whole(instances, timeout_s=150)
            figure(f"scaled: {instances} serve after {scaled_s:.1f} s")
            assert seen.all_right()
    finally:
        service.patch("pdservices", {"spec": {"instances": INSTANCES}})
        service.wait_whole(timeout_s=90)
