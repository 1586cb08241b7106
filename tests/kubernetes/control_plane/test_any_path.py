"""Paths of an API server that are not objects can be read."""

from fulcrum_cluster.client import open_cluster
from tools.kubernetes.cluster import Cluster


async def test_a_json_path_and_a_text_path_can_both_be_read(control_plane: Cluster) -> None:
    async with open_cluster(f"kubeconfig:{control_plane.kubeconfig}") as connection:
        keys = await connection.objects.get_raw("/openid/v1/jwks")
        pulse = await connection.objects.get_raw("/readyz")
    assert ([key["use"] for key in keys["keys"]], pulse) == (["sig"], "ok")
