"""Settings with three tiers, and the rules that identify callers by these settings."""

from pathlib import Path
from typing import Any

from fulcrum_core.api import PDService, QoSTier
from fulcrum_router.access.api_keys import ApiKeys
from fulcrum_router.access.callers import CallerRules
from fulcrum_router.counters import Counters
from fulcrum_router.settings import ServiceSettings, resolve_settings

PREMIUM_KEY, BATCH_KEY = b"premium-key", b"batch-key"
"""Two keys of the tenant acme. The first has the tier of its tenant, premium; the second its own, free."""


def settings(auth: dict[str, Any] | None = None) -> ServiceSettings:
    """Tiers premium (tenant acme), standard (tenants globex and acme) and free (key acme/batch).

    acme is in two tiers: the first is its default.
    """
    matches = {
        "premium": {"tenants": ["acme"]},
        "standard": {"tenants": ["globex", "acme"]},
        "free": {"keys": ["acme/batch"]},
    }
    tiers = [
        QoSTier.model_validate({"metadata": {"name": name}, "spec": {"match": match}})
        for name, match in matches.items()
    ]
    spec = {"model": "m", "qosTiers": list(matches), "router": {} if auth is None else {"auth": auth}}
    service = PDService.model_validate({"metadata": {"name": "chat"}, "spec": spec})
    return resolve_settings(service, tiers)


def rules(folder: Path | None = None) -> tuple[CallerRules, Counters]:
    """Rules with the keys of a folder, and their counters."""
    keys, counters = ApiKeys(folder), Counters()
    keys.read()
    return CallerRules(keys, counters), counters
