"""A TLS connection that breaks within a response or a watch raises `StoreUnavailable`."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from fulcrum_cluster.client import ClusterClient
from fulcrum_cluster.client_config import ClientConfig
from fulcrum_core.api import QoSTier
from fulcrum_core.errors import StoreUnavailable
from fulcrum_core.ports import EventType
from tools.kubernetes import pki

NOT_A_TLS_RECORD = b"this is not a TLS record" * 4


async def _serve_then_break_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a bookmark to a watch, or half a response to another request, then bytes that are not TLS."""
    request = await reader.readuntil(b"\r\n\r\n")
    if b"watch=true" in request:
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
        line = json.dumps(bookmark).encode() + b"\n"
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(line), line))
    else:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    os.write(writer.get_extra_info("socket").fileno(), NOT_A_TLS_RECORD)
    writer.transport.abort()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ClusterClient]:
    root = pki.create_authority("test")
    pki.issue_certificate(root, "server", hosts=("127.0.0.1",)).write(tmp_path, "server")
    root.write(tmp_path, "ca")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    async with await asyncio.start_server(_serve_then_break_tls, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        tls = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        async with ClusterClient(ClientConfig(url=f"https://127.0.0.1:{port}", tls=tls)) as made:
            yield made


async def test_broken_tls_within_a_watch_raises_store_unavailable(
    cluster: ClusterClient,
) -> None:
    async with aclosing(cluster.store.watch(QoSTier, namespace="default", since="1")) as events:
        assert (await anext(events)).type is EventType.BOOKMARK
        with pytest.raises(StoreUnavailable):
            await anext(events)


async def test_broken_tls_within_a_response_raises_store_unavailable(cluster: ClusterClient) -> None:
    with pytest.raises(StoreUnavailable):
        await cluster.store.list(QoSTier, namespace="default")
