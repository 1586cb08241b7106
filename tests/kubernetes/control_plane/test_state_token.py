"""Tokens that a real API server gave out, checked by its real keys."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulcrum_cluster.client import open_cluster
from fulcrum_cluster.clock import SystemClock
from fulcrum_router.control.auth import AUDIENCE, NotAllowed, ServiceAccounts
from tools.kubernetes.cluster import API_SERVER, Cluster


def token(cluster: Cluster, namespace: str, account: str, *more: str) -> str:
    return cluster.kubectl("create", "token", account, f"--namespace={namespace}", *more).strip()


@pytest.fixture
async def accounts(control_plane: Cluster, namespace: str) -> AsyncIterator[ServiceAccounts]:
    """The port of a router that the account `reader` may call."""
    for name in ("reader", "other"):
        control_plane.kubectl("create", "serviceaccount", name, f"--namespace={namespace}")
    async with open_cluster(f"kubeconfig:{control_plane.kubeconfig}") as cluster:
        subjects = [f"system:serviceaccount:{namespace}:reader"]
        yield ServiceAccounts(cluster.objects.get_path, subjects, clock=SystemClock())


async def test_the_caller_is_let_in_with_a_token_for_this_port_only(
    control_plane: Cluster, namespace: str, accounts: ServiceAccounts
) -> None:
    ours = f"--audience={AUDIENCE}"
    await accounts.check(token(control_plane, namespace, "reader", ours))
    with pytest.raises(NotAllowed, match="is none of the callers"):
        await accounts.check(token(control_plane, namespace, "other", ours))
    with pytest.raises(NotAllowed, match="Audience"):
        await accounts.check(token(control_plane, namespace, "reader"))


async def test_a_caller_is_let_in_while_the_api_server_is_away(
    control_plane: Cluster, namespace: str, accounts: ServiceAccounts
) -> None:
    given = token(control_plane, namespace, "reader", f"--audience={AUDIENCE}")
    await accounts.refresh()
    control_plane.kill_part(API_SERVER)
    try:
        await accounts.check(given)
    finally:
        await asyncio.to_thread(control_plane.start_part, API_SERVER)
