"""HTTP client of a router's state port: the autoscaler, the operator, the CLI and the local run read it here.

Every failure (unreachable, slow, token refused, unreadable response) is a `RouterUnavailable`, because no
caller can do anything about the cause. Callers decide what an unavailable router means to them.
"""

import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from fulcrum_core.router_state import FlipRequest, RouterState

M = TypeVar("M", RouterState, FlipRequest)

_RESPONSE_MARGIN_S = 1.0
"""Time that a response may take beyond the requested `timeout_s` before the router counts as unavailable."""


class RouterUnavailable(Exception):
    """The router sent no response, or one that cannot be used."""


class RouterTlsFailed(RouterUnavailable):
    """There is no TLS connection to the state port, mostly because of its certificate; the text says why."""


class TokenFileAuth(httpx.Auth):
    """A bearer token read from a file at every request, because the kubelet replaces the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the file's token to the request; an unreadable file is an `httpx.RequestError`."""
        try:
            token = self.path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise httpx.RequestError(f"{self.path} cannot be read: {error.strerror}") from error
        request.headers["authorization"] = f"Bearer {token}"
        yield request


class FileTrust(ssl.SSLContext):
    """Context of clients that trust the authorities in a PEM file, as the file is when they connect.

    The kubelet replaces the file when its Secret changes.
    """

    _file: Path

    def __new__(cls, file: Path) -> Self:
        """Make a context that itself trusts nobody; `wrap_bio` reads the file."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._file = file
        return made

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection; OSError if the file cannot be read, or has no certificate."""
        self._file.stat()  # its error names the file
        return ssl.create_default_context(cafile=self._file).wrap_bio(*args, **options)


class HttpRouterClient:
    """One router's state port over HTTP. `url` is the port's address, if the client has no base address."""

    def __init__(self, client: httpx.AsyncClient, url: str = "") -> None:
        self._client, self._url = client, url.rstrip("/")

    async def get_state(
        self,
        *,
        min_generation: int = 0,
        timeout_s: float = 0.0,
        response_margin_s: float = _RESPONSE_MARGIN_S,
    ) -> RouterState:
        """Return the router's state as soon as it has applied the generation, or after `timeout_s` as it is.

        Raises:
            RouterUnavailable: also if the response takes `response_margin_s` longer than `timeout_s`.
        """
        query = {"min_generation": min_generation}
        response = await self._get("/state", query, timeout_s, response_margin_s)
        return _parse_response(RouterState, response)

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """Return the last flip request, if its number is above `after`; None if there is none in `timeout_s`.

        Raises:
            RouterUnavailable: as `get_state`.
        """
        response = await self._get("/flip-requests", {"after": after}, timeout_s, _RESPONSE_MARGIN_S)
        return (
            None if response.status_code == httpx.codes.NO_CONTENT else _parse_response(FlipRequest, response)
        )

    async def _get(
        self, path: str, query: dict[str, int], timeout_s: float, response_margin_s: float
    ) -> httpx.Response:
        params = {**query, "timeout_s": timeout_s}
        try:
            response = await self._client.get(
                self._url + path, params=params, timeout=timeout_s + response_margin_s
            )
        except (httpx.HTTPError, OSError) as error:  # OSError: the file with the authorities
            failure = _describe_tls_failure(error)
            if failure is not None:
                raise RouterTlsFailed(failure) from error
            raise RouterUnavailable(f"{path}: {type(error).__name__}") from error
        if not response.is_success:
            raise RouterUnavailable(f"{path}: status {response.status_code}")
        return response


def open_http_client(url: str, *, token: str) -> httpx.AsyncClient:
    """Open a client for the `HttpRouterClient` of one router. To be closed by the caller."""
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False)


def open_http_client_for_all(token_file: Path, *, ca_file: Path | None = None) -> httpx.AsyncClient:
    """Open a client for the `HttpRouterClient`s of many services. To be closed by the caller.

    Args:
        token_file: Token for the state ports.
        ca_file: Authorities of state ports with TLS, as PEM; None: no certificate is accepted.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=10)
    # Not the default, which loads the system's authorities: they issue no certificate for a Service.
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca_file is None else FileTrust(ca_file)
    return httpx.AsyncClient(auth=TokenFileAuth(token_file), limits=limits, trust_env=False, verify=trust)


def with_tls(url: str) -> str:
    """The URL of a state port that serves TLS."""
    return f"https://{url.partition('://')[2]}"


def _describe_tls_failure(error: BaseException) -> str | None:
    """Why there is no TLS connection to the state port; None if the error has another reason."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    closed = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return None if cause is None or closed else str(cause.reason)


def _parse_response(model: type[M], response: httpx.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise RouterUnavailable(f"{model.__name__} cannot be read: {error.error_count()} errors") from error
