"""What commands ask of a running service's autoscaler: its decisions, as it tells them."""

from collections.abc import Sequence
from typing import Any

import httpx

from fulcrum_core.errors import FulcrumError


class AutoscalerUnavailable(FulcrumError):
    """A part of the service does not answer."""


async def fetch_decisions(client: httpx.AsyncClient, url: str, *, limit: int) -> Sequence[dict[str, Any]]:
    """The autoscaler's last decisions, newest last.

    Raises:
        AutoscalerUnavailable: if it does not answer with a list.
    """
    try:
        response = await client.get(f"{url}/decisions", params={"limit": limit}, timeout=2.0)
        response.raise_for_status()
        decisions = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise AutoscalerUnavailable(f"autoscaler ({url}) does not answer: {type(error).__name__}") from error
    if not isinstance(decisions, list):
        raise AutoscalerUnavailable(f"autoscaler ({url}) does not answer with a list")
    return decisions
