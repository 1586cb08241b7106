"""The caller of a request: its tenant and its tier, by API key, trusted headers, or neither.

| who                                 | tenant        | tier                                          |
|-------------------------------------|---------------|-----------------------------------------------|
| anybody, if the service has no auth | `x-tenant-id` | `x-customer-tier`, else by tenant             |
| a trusted proxy that sends either   | `x-tenant-id` | `x-customer-tier`, else by tenant             |
| a client with a valid API key       | the key's     | by key, else by tenant                        |
| others: refused if keys are needed  | none          | the default tier                              |

Headers of others are dropped, counted, and the response says so.

`downstream` asks once for each request, before anything else is decided. What tier and tenant may do is
decided later, in `policy.tiers`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from fulcrum_core.networks import is_in_networks
from fulcrum_router.access.api_keys import ApiKey, ApiKeys
from fulcrum_router.counters import Counters
from fulcrum_router.settings import AccessSettings, ServiceSettings, Tier

TIER_HEADER, TENANT_HEADER = b"x-customer-tier", b"x-tenant-id"
MAX_TENANT_BYTES = 253
_MAX_KNOWN_PEERS = 4_096


class Caller(NamedTuple):
    """Who sends a request."""

    tier: Tier
    tenant: str = ""
    """Empty: not known."""
    header_lines: bytes = b""
    """Header lines of the response which say that a header of the request had no effect."""


class CallerRefused(Exception):
    """The request is not served: its status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class CallerRules:
    """Finds callers, by the settings of the service and the current API keys."""

    def __init__(self, api_keys: ApiKeys, counters: Counters) -> None:
        self.api_keys = api_keys
        self._counters = counters
        self._access: AccessSettings | None = None
        self._is_trusted: dict[str, bool] = {}
        """Whether an address is in a trusted network, by address; a cache for the rules in `_access`."""

    def identify(self, settings: ServiceSettings, headers: Mapping[bytes, bytes], peer: str) -> Caller:
        """Find the caller of a request with these headers from the address `peer`.

        Raises:
            CallerRefused: if it needs a valid API key and has none, or names an impossible tenant.
        """
        access = settings.access
        named = bool(headers.get(TIER_HEADER) or headers.get(TENANT_HEADER))
        if access is None:
            return self._trust_headers(settings, headers) if named else Caller(settings.default_tier)
        if named and self._trusts(access, peer):
            return self._trust_headers(settings, headers)
        key = self._find_key(headers) if access.requires_key else None
        tenant = "" if key is None else key.tenant
        tier = self._match(settings, key, tenant)
        return Caller(tier, tenant, self._drop_headers(headers, tier) if named else b"")

    def _trusts(self, access: AccessSettings, peer: str) -> bool:
        if access is not self._access or len(self._is_trusted) >= _MAX_KNOWN_PEERS:
            self._access, self._is_trusted = access, {}
        trusted = self._is_trusted.get(peer)
        if trusted is None:
            trusted = self._is_trusted[peer] = is_in_networks(peer, access.trusted_networks)
        return trusted

    def _trust_headers(self, settings: ServiceSettings, headers: Mapping[bytes, bytes]) -> Caller:
        tenant = _read_tenant(headers)
        name = headers.get(TIER_HEADER)
        if not name:
            return Caller(self._match(settings, None, tenant), tenant)
        text = name.decode("latin-1")
        if settings.has_tier(text):
            return Caller(settings.find_tier(text), tenant)
        self._counters.unknown_tiers += 1
        tier = self._match(settings, None, tenant)
        return Caller(tier, tenant, b"x-fulcrum-tier: %b; ignored=unknown\r\n" % tier.name.encode())

    def _match(self, settings: ServiceSettings, key: ApiKey | None, tenant: str) -> Tier:
        tier = None if key is None else settings.tiers_by_key.get(key.name)
        return tier or settings.tiers_by_tenant.get(tenant, settings.default_tier)

    def _find_key(self, headers: Mapping[bytes, bytes]) -> ApiKey:
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        key = self.api_keys.find(presented.strip()) if scheme.lower() == b"bearer" else None
        if key is None:
            self._counters.refused_callers["unknown" if presented else "missing"] += 1
            raise CallerRefused(401, "a valid API key is required: authorization: Bearer KEY")
        return key

    def _drop_headers(self, headers: Mapping[bytes, bytes], tier: Tier) -> bytes:
        for name in (TIER_HEADER, TENANT_HEADER):
            if headers.get(name):
                self._counters.dropped_headers[name.decode()] += 1
        return b"x-fulcrum-tier: %b; ignored=untrusted\r\n" % tier.name.encode()


def _read_tenant(headers: Mapping[bytes, bytes]) -> str:
    name = headers.get(TENANT_HEADER, b"")
    if len(name) > MAX_TENANT_BYTES:
        raise CallerRefused(400, f"x-tenant-id is longer than {MAX_TENANT_BYTES} bytes")
    return name.decode("latin-1")
