"""Which tenants are counted by name, and that counts never fall while a name is kept."""

from fulcrum_router.policy.tiers.tenant_counts import (
    DEFAULT_NAMED_TENANTS,
    FORGOTTEN_AFTER_S,
    OTHERS,
    WINDOW_S,
    TenantCounts,
    TenantResult,
)

MET, MISSED = TenantResult.MET, TenantResult.MISSED


def totals(counts: TenantCounts, now_s: float) -> dict[str, int]:
    """Requests by tenant."""
    found: dict[str, int] = {}
    for tenant, _, count in counts.list_counts(now_s):
        found[tenant] = found.get(tenant, 0) + count
    return found


def fill() -> TenantCounts:
    """As many tenants as have a name, with two requests each."""
    counts = TenantCounts()
    for number in range(DEFAULT_NAMED_TENANTS):
        for _ in range(2):
            counts.record(f"t{number}", MET, WINDOW_S)
    return counts


def test_requests_are_counted_by_tenant_and_result() -> None:
    counts = TenantCounts()
    counts.record("acme", MET, 1.0)
    counts.record("acme", MISSED, 1.0)
    assert list(counts.list_counts(1.0)) == [
        ("acme", "met", 1),
        ("acme", "missed", 1),
        ("acme", "refused", 0),
        ("acme", "limited", 0),
    ]


def test_tenants_beyond_the_limit_are_counted_together() -> None:
    counts = fill()
    for number in range(10_000):
        counts.record(f"flood-{number}", MET, WINDOW_S + 1)
    assert totals(counts, WINDOW_S + 1) == {
        **{f"t{n}": 2 for n in range(DEFAULT_NAMED_TENANTS)},
        OTHERS: 10_000,
    }


def test_a_tenant_with_many_more_requests_takes_a_place_and_begins_at_zero() -> None:
    counts, next_s = fill(), 2 * WINDOW_S
    for _ in range(4):
        counts.record("twice", MET, WINDOW_S)
    for _ in range(5):
        counts.record("big", MET, WINDOW_S)
    counts.record("big", MET, next_s)
    found = totals(counts, next_s)
    assert (found["big"], found[OTHERS], "t0" in found, "twice" in found, len(found)) == (
        1, 9, False, False, DEFAULT_NAMED_TENANTS + 1,
    )  # fmt: skip


def test_an_idle_tenant_is_no_longer_named() -> None:
    counts = fill()
    counts.record("t5", MET, WINDOW_S + FORGOTTEN_AFTER_S)
    assert totals(counts, WINDOW_S + FORGOTTEN_AFTER_S + 1) == {"t5": 3}


def test_a_service_sets_how_many_tenants_have_a_name() -> None:
    counts = fill()
    counts.record("t3", MET, WINDOW_S)
    counts.name_at_most(1)
    assert totals(counts, WINDOW_S) == {"t3": 3}
    counts.name_at_most(50)
    for number in range(60):
        counts.record(f"t{number}", MET, WINDOW_S)
    assert len(totals(counts, WINDOW_S)) == 51
