"""Client of the autoscaler's `/decisions`: directly in a local run, through the API server in a cluster.

The API server's proxy makes port forwarding unnecessary. `connection` chooses between the two; `play` and the
page's sources ask a local run's directly.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx

from fulcrum_core.errors import FulcrumError, StoreError

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectApi

AUTOSCALER_LABELS = "app.kubernetes.io/part-of=fulcrum,app.kubernetes.io/component=autoscaler"
PORT_NAME = "http"


class AutoscalerUnavailable(FulcrumError):
    """The autoscaler does not respond, or its response is not a list of decisions."""


async def fetch_decisions(client: httpx.AsyncClient, url: str, *, limit: int) -> Sequence[dict[str, Any]]:
    """Return the last decisions of the autoscaler at `url`, oldest first.

    Raises:
        AutoscalerUnavailable: if it does not respond with a list.
    """
    try:
        response = await client.get(f"{url}/decisions", params={"limit": limit}, timeout=2.0)
        response.raise_for_status()
        decisions = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise AutoscalerUnavailable(f"autoscaler ({url}) does not respond: {type(error).__name__}") from error
    return _check_list(decisions, f"autoscaler ({url})")


async def fetch_cluster_decisions(
    objects: "ObjectApi", service: str, *, namespace: str, limit: int
) -> Sequence[dict[str, Any]]:
    """Return the last decisions on one service, oldest first.

    A cluster may run several autoscalers, each for some namespaces. Only the autoscaler that manages the
    service returns decisions on it.

    Raises:
        AutoscalerUnavailable: if there is no autoscaler, or none returned decisions and one did not respond.
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
            f"the autoscaler does not respond through the API server: {error}"
        ) from error
    return _check_list(document, "the autoscaler")


def _check_list(document: Any, autoscaler: str) -> Sequence[dict[str, Any]]:
    if not isinstance(document, list):
        raise AutoscalerUnavailable(f"{autoscaler} does not respond with a list of decisions")
    return document


def decisions_proxy_path(autoscaler: Mapping[str, Any], service: str, *, namespace: str, limit: int) -> str:
    """Path at the API server that is forwarded to `/decisions` of the autoscaler behind that Service."""
    meta, ports = autoscaler["metadata"], autoscaler["spec"].get("ports") or [{}]
    names = [port.get("name") or port.get("port", "") for port in ports]
    port = PORT_NAME if PORT_NAME in names else names[0]
    query = urlencode({"namespace": namespace, "service": service, "limit": limit})
    return f"/api/v1/namespaces/{meta['namespace']}/services/{meta['name']}:{port}/proxy/decisions?{query}"


async def _find_autoscaler_services(objects: "ObjectApi", namespace: str) -> Sequence[Mapping[str, Any]]:
    """List the Services of all autoscalers that the user may list; those in `namespace` come first."""
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
    raise AutoscalerUnavailable(f"no Service with the labels {AUTOSCALER_LABELS} found{last_error}")


def _sort_key(meta: Mapping[str, Any], namespace: str) -> tuple[bool, str, str]:
    return meta["namespace"] != namespace, meta["namespace"], meta["name"]
