"""Tokens for the state port, issued by a real API server: the router's authenticator verifies them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulcrum_cluster.client import open_cluster
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.router_state import STATE_PORT_AUDIENCE
from fulcrum_router.control.auth import ServiceAccountAuthenticator, Unauthorized
from tools.kubernetes.cluster import API_SERVER, Cluster


def token(cluster: Cluster, namespace: str, account: str, *more: str) -> str:
    return cluster.kubectl("create", "token", account, f"--namespace={namespace}", *more).strip()


@pytest.fixture
async def authenticator(control_plane: Cluster, namespace: str) -> AsyncIterator[ServiceAccountAuthenticator]:
    """Accepts the account `reader`, and not `other`."""
    for name in ("reader", "other"):
        control_plane.kubectl("create", "serviceaccount", name, f"--namespace={namespace}")
    async with open_cluster(f"kubeconfig:{control_plane.kubeconfig}") as cluster:
        subjects = [f"system:serviceaccount:{namespace}:reader"]
        yield ServiceAccountAuthenticator(cluster.objects.get_raw, subjects, clock=SystemClock())


async def test_only_the_named_account_with_a_token_for_this_port_is_accepted(
    control_plane: Cluster, namespace: str, authenticator: ServiceAccountAuthenticator
) -> None:
    ours = f"--audience={STATE_PORT_AUDIENCE}"
    await authenticator.authenticate(token(control_plane, namespace, "reader", ours))
    with pytest.raises(Unauthorized, match="may not call the state port"):
        await authenticator.authenticate(token(control_plane, namespace, "other", ours))
    with pytest.raises(Unauthorized, match="Audience"):
        await authenticator.authenticate(token(control_plane, namespace, "reader"))


async def test_a_caller_is_accepted_during_an_api_server_outage(
    control_plane: Cluster, namespace: str, authenticator: ServiceAccountAuthenticator
) -> None:
    given = token(control_plane, namespace, "reader", f"--audience={STATE_PORT_AUDIENCE}")
    await authenticator.refresh_keys()
    control_plane.kill_component(API_SERVER)
    try:
        await authenticator.authenticate(given)
    finally:
        await asyncio.to_thread(control_plane.start_component, API_SERVER)
