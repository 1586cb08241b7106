"""From `helm install` and a manifest of six lines to the first token, within a bar in seconds."""

import time

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.installation import Helm, build_values
from tests.kubernetes.nodes.service import MANIFEST, DeployedService
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

ALL_READY_S = 45.0


@pytest.mark.timeout(480)
def test_chart_and_a_six_line_manifest_give_a_first_token_and_are_all_ready_within_45_seconds(
    cluster: Cluster, helm: Helm, record_measurement: RecordMeasurement
) -> None:
    begin = time.monotonic()
    helm.install(build_values())
    installed_s = time.monotonic() - begin
    cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    chat = DeployedService(cluster, "default", "chat")
    wait_for(lambda: chat.receives_first_token("n1"), "the first token", timeout_s=120)
    first_token_s = time.monotonic() - begin
    chat.wait_until_ready(timeout_s=60)
    ready_s = time.monotonic() - begin
    record_measurement(
        f"helm install {installed_s:.1f} s, first token {first_token_s:.1f} s, all Ready {ready_s:.1f} s"
    )
    assert first_token_s <= ready_s <= ALL_READY_S
