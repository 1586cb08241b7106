"""What an API server answers at paths that are no objects."""

from fulcrum_cluster.client import open_cluster
from tools.kubernetes.cluster import Cluster


async def test_keys_and_pulse_are_read_whatever_their_type(control_plane: Cluster) -> None:
    async with open_cluster(f"kubeconfig:{control_plane.kubeconfig}") as connection:
        keys = await connection.objects.get_path("/openid/v1/jwks")
        pulse = await connection.objects.get_path("/readyz")
    assert ([key["use"] for key in keys["keys"]], pulse) == (["sig"], "ok")
