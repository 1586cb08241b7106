"""The autoscaler of a cluster, asked through the API server: no port has to be forwarded for it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fulcrum_cli.target.local_autoscaler import Unreachable
from fulcrum_core.errors import StoreError

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectApi

LABELS = "app.kubernetes.io/part-of=fulcrum,app.kubernetes.io/component=autoscaler"
PORT = "http"


async def cluster_decisions(
    objects: "ObjectApi", service: str, *, namespace: str, limit: int
) -> Sequence[dict[str, Any]]:
    """The last decisions on one service, newest last, of the autoscaler that decides on it.

    A cluster may have several, each for some namespaces: who looks after a service has something to tell.

    Raises:
        Unreachable: if there is none, or one that may be the one does not answer with a list.
    """
    away: Unreachable | None = None
    for found in await _autoscalers(objects, namespace):
        try:
            told = await _ask(objects, decisions_path(found, service, namespace=namespace, limit=limit))
        except Unreachable as error:
            away = away or error
            continue
        if told:
            return told
    if away is not None:
        raise away
    return ()


async def _ask(objects: "ObjectApi", where: str) -> Sequence[dict[str, Any]]:
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


async def _autoscalers(objects: "ObjectApi", namespace: str) -> Sequence[Mapping[str, Any]]:
    """The Services of all autoscalers that may be seen; those in the same namespace go first."""
    from fulcrum_cluster.objects import SERVICE

    refusal = ""
    for where in ("", namespace):
        try:
            found, _ = await objects.list(SERVICE, namespace=where, labels=LABELS)
        except StoreError as error:
            refusal = f": {error}"
            continue
        if found:
            return sorted(found, key=lambda body: _nearest(body["metadata"], namespace))
    raise Unreachable(f"no Service with the labels {LABELS} was found{refusal}")


def _nearest(meta: Mapping[str, Any], namespace: str) -> tuple[bool, str, str]:
    return meta["namespace"] != namespace, meta["namespace"], meta["name"]
