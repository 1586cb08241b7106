"""The autoscaler of a cluster, asked through the API server: no port has to be forwarded for it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fulcrum_cli.ports import Unreachable
from fulcrum_core.errors import StoreError

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectApi

LABELS = "app.kubernetes.io/part-of=fulcrum,app.kubernetes.io/component=autoscaler"
PORT = "http"


async def cluster_decisions(
    objects: "ObjectApi", service: str, *, namespace: str, limit: int
) -> Sequence[dict[str, Any]]:
    """The autoscaler's last decisions on one service, newest last.

    Raises:
        Unreachable: if there is no autoscaler, or it does not answer with a list.
    """
    where = decisions_path(await _find(objects, namespace), service, namespace=namespace, limit=limit)
    try:
        listed = await objects.get_path(where)
    except StoreError as error:
        raise Unreachable(f"the autoscaler does not answer through the API server: {error}") from error
    if not isinstance(listed, list):
        raise Unreachable("the autoscaler does not answer with a list")
    return listed


def decisions_path(found: Mapping[str, Any], service: str, *, namespace: str, limit: int) -> str:
    """The path at the API server that leads to `/decisions` of the autoscaler behind that Service."""
    meta, ports = found["metadata"], found["spec"].get("ports") or [{}]
    names = [port.get("name") or port.get("port", "") for port in ports]
    port = PORT if PORT in names else names[0]
    query = urlencode({"namespace": namespace, "service": service, "limit": limit})
    return f"/api/v1/namespaces/{meta['namespace']}/services/{meta['name']}:{port}/proxy/decisions?{query}"


async def _find(objects: "ObjectApi", namespace: str) -> Mapping[str, Any]:
    """The autoscaler's Service, wherever it may be seen; one in the same namespace goes first."""
    from fulcrum_cluster.objects import SERVICE

    refusal = ""
    for where in (namespace, ""):
        try:
            found, _ = await objects.list(SERVICE, namespace=where, labels=LABELS)
        except StoreError as error:
            refusal = f": {error}"
            continue
        if found:
            return min(found, key=lambda body: (body["metadata"]["namespace"], body["metadata"]["name"]))
    raise Unreachable(f"no Service with the labels {LABELS} was found{refusal}")
