"""TLS on the clients' port: requests, streams, rejections, and a certificate that is renewed."""

import asyncio
import datetime
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fulcrum_core.errors import InvalidInput
from fulcrum_router.control.background_task import background_task
from fulcrum_router.data_path import tls
from fulcrum_router.data_path.tls import TlsFiles, make_tls_context, reload_certificate
from fulcrum_router.http1.tls_handshakes import ABORTED, Source, TlsAcceptor, choose_aborted, find_source
from tests.integration.router.fake_engines import DEADLINE_S, FakeEngine, build_post, run_router
from tests.waiting import wait_until

BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)


def write_certificate(folder: Path, *, serial: int) -> TlsFiles:
    """Write a certificate of this machine's, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = TlsFiles(folder / "tls.crt", folder / "tls.key")
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return files


class CountedFiles(TlsFiles):
    """Counts how often the files were looked at after they had changed."""

    changes_read = 0
    first: tuple[float, float] | None = None

    def read_versions(self) -> tuple[float, float]:
        versions = super().read_versions()
        type(self).first = self.first or versions
        type(self).changes_read += versions != self.first
        return versions


def trust(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.certificate)


async def read_serial(port: int, files: TlsFiles) -> int | None:
    """Serial number of the certificate that the router presents; None if it is not that of the files."""
    try:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust(files), server_hostname="localhost"
        )
    except ssl.SSLError:
        return None
    certificate = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    await writer.wait_closed()
    return int(certificate["serialNumber"], 16)


@asynccontextmanager
async def accept_connections(acceptor: TlsAcceptor) -> AsyncIterator[int]:
    """Have an acceptor listen; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.setblocking(False)
        async with background_task(partial(acceptor.run, bound), name="handshakes", failures={}):
            yield bound.getsockname()[1]


class EchoProtocol(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def _reloading(context: ssl.SSLContext, files: TlsFiles) -> AbstractAsyncContextManager[None]:
    return background_task(partial(reload_certificate, context, files), name="certificate", failures={})


async def send_requests_with_tls(folder: Path) -> list[tuple[int, int]]:
    """Send a completion and a stream; return statuses and numbers of tokens."""
    files, got = write_certificate(folder, serial=1), []
    async with (
        run_router(FakeEngine("p1"), FakeEngine("d1"), tls=make_tls_context(files)) as world,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust(files))) as client,
    ):
        url = f"https://localhost:{world.port}/v1/completions"
        for stream in (False, True):
            async with client.post(url, json={"prompt": "hi", "stream": stream}) as response:
                got.append((response.status, (await response.text()).count("p1 ")))
    return got


async def test_requests_and_streams_are_served_with_tls(tmp_path: Path) -> None:
    assert await send_requests_with_tls(tmp_path) == [(200, 3), (200, 3)]


def test_requests_and_streams_are_served_with_tls_on_the_routers_own_event_loop(tmp_path: Path) -> None:
    assert uvloop.run(send_requests_with_tls(tmp_path)) == [(200, 3), (200, 3)]


async def test_a_rejected_client_and_one_without_tls_are_disconnected(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, serial=1)
    async with (
        run_router(FakeEngine("d1"), tls=make_tls_context(files)) as world,
        asyncio.timeout(DEADLINE_S),
    ):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", world.port, ssl=trust(files), server_hostname="localhost"
        )
        writer.write(b"NONSENSE\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(build_post(b"{}"))
        assert b"HTTP" not in await reader.read()
        writer.close()


async def leave_handshakes_unfinished(folder: Path) -> tuple[int, int, int]:
    """Begin 20 handshakes where 8 are allowed, then a connection that says hello. Count what failed."""
    files = write_certificate(folder, serial=1)
    acceptor = TlsAcceptor(make_tls_context(files), EchoProtocol, max_handshakes=8, timeout_s=DEADLINE_S)
    async with accept_connections(acceptor) as port, asyncio.timeout(DEADLINE_S):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await wait_until(lambda: acceptor.failures == 12, "the oldest are aborted")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust(files), server_hostname="localhost"
        )
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        aborted = 0
        for peer, _ in silent[:13]:
            with suppress(ConnectionError):
                assert await peer.read() == b""
            aborted += 1
        for _, opened in (*silent, (reader, writer)):
            opened.close()
        return aborted, acceptor.handshakes, acceptor.failures


async def test_handshakes_that_are_not_finished_are_limited_and_leave_room_for_others(tmp_path: Path) -> None:
    assert await leave_handshakes_unfinished(tmp_path) == (13, 7, 13)


async def test_one_address_does_not_end_the_handshakes_of_others(tmp_path: Path) -> None:
    """A slow client begins first; then another address begins more handshakes than there may be."""
    files, failures = write_certificate(tmp_path, serial=1), dict[str, int]()
    acceptor = TlsAcceptor(
        make_tls_context(files), EchoProtocol, max_handshakes=8, timeout_s=DEADLINE_S, failures=failures
    )
    async with accept_connections(acceptor) as port, asyncio.timeout(DEADLINE_S):
        _, slow = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        await wait_until(lambda: acceptor.handshakes == 1, "the slow client is accepted")
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await wait_until(lambda: failures.get(ABORTED) == 13, "the flood pushes out its own")
        await slow.start_tls(trust(files), server_hostname="localhost")
        assert slow.get_extra_info("ssl_object").version()
        for _, writer in (*flood, (None, slow)):
            writer.close()


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", ("10.0.0.1", "10.0.0.1")),
        ("::ffff:10.0.0.1", ("10.0.0.1", "10.0.0.1")),
        ("2001:db8::1", ("20010db80000", "20010db800000000")),
        ("2001:db8::ffff:2", ("20010db80000", "20010db800000000")),
        ("2001:db8:0:1::2", ("20010db80000", "20010db800000001")),
        ("fe80::1%eth0", ("fe8000000000", "fe80000000000000")),
    ],
)
def test_addresses_of_one_network_are_one_source(address: str, source: Source) -> None:
    assert find_source(address) == source


@pytest.mark.parametrize(
    ("flood", "aborted"),
    [
        pytest.param([f"2001:db8:0:{n:x}::1" for n in range(460)], 52, id="a site with many networks"),
        pytest.param([f"2001:db8:{n:x}::1" for n in range(2, 462)], 0, id="many sites"),
        pytest.param([f"2001:db8:0:{n % 9:x}::1" for n in range(460)], 52, id="a site with few networks"),
    ],
)
def test_the_flood_gives_way_and_not_one_address_with_some_handshakes(flood: list[str], aborted: int) -> None:
    good = ["192.0.2.1"] * 52 if aborted else [flood.pop(), *["192.0.2.1"] * 32]
    sources = dict(enumerate(map(find_source, good + flood)))
    assert choose_aborted(sources, fair=512 / 16) == aborted


async def test_a_handshake_that_takes_too_long_is_aborted(tmp_path: Path) -> None:
    context = make_tls_context(write_certificate(tmp_path, serial=1))
    acceptor = TlsAcceptor(context, EchoProtocol, timeout_s=0.05)
    async with accept_connections(acceptor) as port, asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await wait_until(lambda: acceptor.failures == 1, "the handshake has failed")
        writer.close()


async def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "RELOAD_INTERVAL_S", 0.02)
    files = write_certificate(tmp_path, serial=1)
    context = make_tls_context(files)
    async with run_router(tls=context) as world, _reloading(context, files):
        assert await read_serial(world.port, files) == 1
        files = write_certificate(tmp_path, serial=2)

        async def is_renewed() -> bool:
            return await read_serial(world.port, files) == 2

        await wait_until(is_renewed, "the new certificate is presented")


async def test_a_certificate_without_its_key_leaves_the_one_before_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "RELOAD_INTERVAL_S", 0.02)
    (other := tmp_path / "other").mkdir()
    files, replacement = write_certificate(tmp_path, serial=1), write_certificate(other, serial=2)
    trusted = TlsFiles(tmp_path / "trusted.crt", files.key)
    trusted.certificate.write_bytes(files.certificate.read_bytes())
    context, watched = make_tls_context(files), CountedFiles(files.certificate, files.key)
    async with run_router(tls=context) as world, _reloading(context, watched):
        assert await read_serial(world.port, trusted) == 1
        files.certificate.write_bytes(replacement.certificate.read_bytes())
        await wait_until(lambda: watched.changes_read > 2, "the replaced file is tried")
        assert await read_serial(world.port, trusted) == 1


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "a", tmp_path / "b")
    with pytest.raises(InvalidInput, match=r"--tls-certificate \(.*a\) cannot be used: No such file"):
        make_tls_context(missing)
