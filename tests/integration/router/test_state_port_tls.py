"""TLS on the state port: the token goes only to a router with a certificate of a trusted authority."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulcrum_cluster.router_client import (
    HttpRouterClient,
    RouterTlsFailed,
    RouterUnavailable,
    open_http_client_for_all,
)
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.router_view import ClusterRouterView
from fulcrum_router.data_path import tls
from fulcrum_router.options import parse_options
from fulcrum_router.server import serve
from tests.integration.router.fake_engines import DEADLINE_S
from tests.unit.operator.builders import service
from tests.waiting import wait_until
from tools.kubernetes import pki

TOKEN = "a-token"


@dataclass
class StatePort:
    """A router whose state port serves TLS, and the files of its callers."""

    folder: Path
    port: int = 0

    def issue(self, authority: pki.CertificateAndKey, *, host: str = "127.0.0.1") -> None:
        """Write a new certificate, as the kubelet does when the Secret changes."""
        pki.issue_certificate(authority, "router", hosts=(host,)).write(self.folder, "tls")

    async def read(self, *, ca: Path | None, scheme: str = "https") -> str:
        """Name of the service by the state port, or the name of the error and its text."""
        async with open_http_client_for_all(self.folder / "token", ca_file=ca) as client:
            try:
                state = await HttpRouterClient(client, f"{scheme}://127.0.0.1:{self.port}").get_state(
                    response_margin_s=DEADLINE_S
                )
            except RouterUnavailable as error:
                return f"{type(error).__name__}: {error}"
        return state.service

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        files = self.folder
        options = parse_options(
            [
                *("--service", "chat", "--static", "decode=127.0.0.1:9"),
                *("--token-file", f"{files}/token"),
                *("--state-tls-certificate", f"{files}/tls.crt", "--state-tls-key", f"{files}/tls.key"),
            ]
        )
        ready, stopped = asyncio.Event(), asyncio.Event()

        def announce(**ports: int) -> None:
            self.port = ports["state_port"]
            ready.set()

        thresholds = gc.get_threshold()
        running = asyncio.create_task(serve(options, stopped, announce=announce))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await ready.wait()
            yield
        finally:
            stopped.set()
            await running
            gc.unfreeze()  # a router freezes the objects of its start-up
            gc.set_threshold(*thresholds)


@pytest.fixture
def authority(tmp_path: Path) -> pki.CertificateAndKey:
    made = pki.create_authority("first")
    made.write(tmp_path, "ca")
    return made


@pytest.fixture
async def state_port(
    tmp_path: Path, authority: pki.CertificateAndKey, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StatePort]:
    monkeypatch.setattr(tls, "RELOAD_INTERVAL_S", 0.01)
    (tmp_path / "token").write_text(TOKEN)
    made = StatePort(tmp_path)
    made.issue(authority)
    async with made.serving():
        yield made


@pytest.mark.parametrize("text", ["", "# Société\n", "garbage"])
async def test_an_authority_file_without_a_certificate_trusts_nobody(tmp_path: Path, text: str) -> None:
    authority = pki.create_authority("test")
    state_port = StatePort(tmp_path)
    state_port.issue(authority)
    file = tmp_path / "ca.pem"
    file.write_text(text, encoding="utf-8")
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    async with state_port.serving():
        assert (await state_port.read(ca=file)).startswith("RouterTlsFailed: ")


async def test_a_comment_in_the_authority_file_may_be_in_any_language(tmp_path: Path) -> None:
    authority = pki.create_authority("test")
    state_port = StatePort(tmp_path)
    state_port.issue(authority)
    file = tmp_path / "ca.pem"
    file.write_bytes("# Société\n".encode() + authority.certificate_pem())
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    async with state_port.serving():
        assert await state_port.read(ca=file) == "chat"


async def test_the_state_is_read_with_the_authority_and_never_without(
    state_port: StatePort, tmp_path: Path
) -> None:
    pki.create_authority("other").write(tmp_path, "other")
    known, other, missing = tmp_path / "ca.crt", tmp_path / "other.crt", tmp_path / "missing.crt"
    assert [await state_port.read(ca=ca) for ca in (known, other, None, missing)] == [
        "chat",
        "RouterTlsFailed: unable to get local issuer certificate",
        "RouterTlsFailed: unable to get local issuer certificate",
        f"RouterTlsFailed: {missing}: No such file or directory",
    ]
    assert (await state_port.read(ca=known, scheme="http")).startswith("RouterUnavailable: /state: ")


async def test_the_operator_names_why_it_cannot_read_the_state(state_port: StatePort, tmp_path: Path) -> None:
    key, cache = ServiceKey("default", "chat"), ObjectCache(lambda _key: None)
    made = service(router={"stateTls": {"secretName": "state"}})
    cache.put_resource(made.replace(metadata=made.metadata.model_copy(update={"resource_version": "1"})))

    async def look(ca: Path | None) -> tuple[bool, list[tuple[str, str]]]:
        """Whether the state could be read, and the causes of Degraded."""
        view = ClusterRouterView(
            cache,
            token_file=tmp_path / "token",
            is_own_service=lambda _key: True,
            state_url=f"http://127.0.0.1:{state_port.port}",
            ca_file=ca,
        )
        async with aclosing(view):
            state = await view.read_state(key)
            return state is not None, [(cause.reason, cause.message) for cause in view.problems(key)]

    failed = "the state port of the router: unable to get local issuer certificate"
    advice = "the operator trusts no authority: set router.stateCASecret of the chart"
    assert [await look(tmp_path / "ca.crt"), await look(None)] == [
        (True, []),
        (False, [("StatePortUntrusted", f"{failed}; {advice}; nothing flips until its state can be read")]),
    ]


async def test_a_certificate_for_another_service_is_refused(
    state_port: StatePort, authority: pki.CertificateAndKey, tmp_path: Path
) -> None:
    state_port.issue(authority, host="other.default.svc")
    refused = "RouterTlsFailed: IP address mismatch, certificate is not valid for '127.0.0.1'."

    async def is_refused() -> bool:
        return await state_port.read(ca=tmp_path / "ca.crt") == refused

    await wait_until(is_refused, refused)


async def test_new_certificates_and_authorities_are_used_without_a_restart(
    state_port: StatePort, tmp_path: Path
) -> None:
    second = pki.create_authority("second")
    state_port.issue(second)
    async with open_http_client_for_all(tmp_path / "token", ca_file=tmp_path / "ca.crt") as client:
        router = HttpRouterClient(client, f"https://127.0.0.1:{state_port.port}")

        async def is_refused() -> bool:
            return "certificate" in await state_port.read(ca=tmp_path / "ca.crt")

        await wait_until(is_refused, "the new certificate")
        with pytest.raises(RouterTlsFailed):
            await router.get_state()
        second.write(tmp_path, "ca")
        assert (await router.get_state()).service == "chat"
