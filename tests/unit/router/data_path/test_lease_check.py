"""The lease check asks each source once, and says in one line what it found."""

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fulcrum_router.data_path import lease_check


@pytest.mark.parametrize(("expired", "kv_valid"), [(3.0, True), (4.0, False), (None, False)])
async def test_a_response_behind_many_late_transfers_is_one_line_of_the_log(
    expired: float | None, *, kv_valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode instance that is behind has hundreds of late transfers, and each response asks about all."""
    asked, found = list[str](), list[bool]()

    async def fetch(source: Any) -> float | None:
        asked.append(source.name)
        return expired

    monkeypatch.setattr(lease_check, "fetch_expired_transfers", fetch)
    source = SimpleNamespace(name="p0")
    response: Any = SimpleNamespace(
        instance=SimpleNamespace(name="d0", cache_salt="s"),
        cache_salt="s",
        find_late_transfers=lambda: [SimpleNamespace(source=source, expired_before=3.0)] * 200,
        finish_lease_check=lambda *, kv_valid: found.append(kv_valid),
    )
    with capture_logs() as lines:
        await lease_check.check_kv_leases(response)
    assert (asked, found, len(lines)) == (["p0"], [kv_valid], 1)
    assert lines[0]["late_transfers"] == 200
