"""The autoscaler of a cluster, asked through the API server: no port has to be forwarded for it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fulcrum_cli.target.autoscaler_client import AutoscalerUnavailable
from fulcrum_core.errors import StoreError

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectApi

AUTOSCALER_LABELS = "app.kubernetes.io/part-of=fulcrum,app.kubernetes.io/component=autoscaler"
PORT_NAME = "http"


async def fetch_cluster_decisions(
    objects: "ObjectApi", service: str, *, namespace: str, limit: int
) -> Sequence[dict[str, Any]]:
    """The last decisions on one service, newest last, of the autoscaler that decides on it.

    A cluster may have several, each for some namespaces: who looks after a service has something to tell.

    Raises:
        AutoscalerUnavailable: if there is none, or one that may be the one does not answer with a list.
    """
    first_error: AutoscalerUnavailable | None = None
    for autoscaler in await _find_autoscaler_services(objects, namespace):
        try:
            decisions = await _get_list(
                objects, decisions_proxy_path(autoscaler, service, namespace=namespace, limit=limit)
            )
        except AutoscalerUnavailable as error:
            first_error = first_error or error
            continue
        if decisions:
            return decisions
    if first_error is not None:
        raise first_error
    return ()


async def _get_list(objects: "ObjectApi", path: str) -> Sequence[dict[str, Any]]:
    try:
        document = await objects.get_raw(path)
    except StoreError as error:
        raise AutoscalerUnavailable(
            f"the autoscaler does not answer through the API server: {error}"
        ) from error
    if not isinstance(document, list):
        raise AutoscalerUnavailable("the autoscaler does not answer with a list")
    return document


def decisions_proxy_path(autoscaler: Mapping[str, Any], service: str, *, namespace: str, limit: int) -> str:
    """The path at the API server that leads to `/decisions` of the autoscaler behind that Service."""
    meta, ports = autoscaler["metadata"], autoscaler["spec"].get("ports") or [{}]
    names = [port.get("name") or port.get("port", "") for port in ports]
    port = PORT_NAME if PORT_NAME in names else names[0]
    query = urlencode({"namespace": namespace, "service": service, "limit": limit})
    return f"/api/v1/namespaces/{meta['namespace']}/services/{meta['name']}:{port}/proxy/decisions?{query}"


async def _find_autoscaler_services(objects: "ObjectApi", namespace: str) -> Sequence[Mapping[str, Any]]:
    """The Services of all autoscalers that may be seen; those in the same namespace go first."""
    from fulcrum_cluster.objects import SERVICE

    last_error = ""
    for scope in ("", namespace):
        try:
            found, _ = await objects.list(SERVICE, namespace=scope, labels=AUTOSCALER_LABELS)
        except StoreError as error:
            last_error = f": {error}"
            continue
        if found:
            return sorted(found, key=lambda body: _sort_key(body["metadata"], namespace))
    raise AutoscalerUnavailable(f"no Service with the labels {AUTOSCALER_LABELS} was found{last_error}")


def _sort_key(meta: Mapping[str, Any], namespace: str) -> tuple[bool, str, str]:
    return meta["namespace"] != namespace, meta["namespace"], meta["name"]
