"""From nothing to the first token."""

import time

import pytest

from tests.conftest import Figure
from tests.kubernetes.nodes.installation import Helm, values
from tests.kubernetes.nodes.service import MANIFEST, Service
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

ALL_READY_S = 45.0


@pytest.mark.timeout(480)
def test_chart_and_a_six_line_manifest_give_a_first_token_and_are_all_ready_within_45_seconds(
    cluster: Cluster, helm: Helm, figure: Figure
) -> None:
    begin = time.monotonic()
    helm.install(values())
    installed_s = time.monotonic() - begin
    cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    chat = Service(cluster, "default", "chat")
    wait_for(lambda: chat.first_token("n1"), "the first token", timeout_s=120)
    first_token_s = time.monotonic() - begin
    chat.wait_whole(timeout_s=60)
    whole_s = time.monotonic() - begin
    figure(f"helm install {installed_s:.1f} s, first token {first_token_s:.1f} s, all Ready {whole_s:.1f} s")
    assert first_token_s <= whole_s <= ALL_READY_S
