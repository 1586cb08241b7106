"""KV transfers between two engine models: correct ones, late ones, and those that kill an engine.

Both engines have blocks of four tokens; a lease is 30 s.
"""

from typing import Any

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_simulator.engine import (
    Engine,
    EngineDead,
    EngineEvent,
    EngineRequest,
    ExportedKv,
    Finished,
    FinishReason,
    KvExportRequest,
    KvFetch,
    KvImportRequest,
    OutputToken,
    block_hashes,
    pulled_digest,
)
from fulcrum_simulator.text import prompt_digest

BLOCKS = 8
PROMPT, OTHER_PROMPT, PROMPT_WITH_SAME_START = (
    b"a" * 40,
    b"b" * 40,
    b"a" * 16 + b"c" * 24,
)  # ten tokens each: three blocks


def engine(name: str, *, blocks: int = BLOCKS, **coefficients: Any) -> Engine:
    changes = {
        **coefficients,
        "block_size": 4,
        "kv_capacity_tokens": 4 * blocks,
        "token_budget": 64,
        "kv_bytes_per_token": 100,
    }
    return Engine(load_profile("laptop").model_copy(update=changes), engine_id=name)


def request(name: str, prompt: bytes, **fields: Any) -> EngineRequest:
    defaults = {
        "arrival_s": 0.0,
        "prompt_tokens": len(prompt) // 4,
        "max_tokens": 1,
        "block_hashes": block_hashes(prompt, block_bytes=16),
    }
    return EngineRequest(id=name, digest=prompt_digest(prompt), **{**defaults, **fields})


def step(engine: Engine, now_s: float) -> list[EngineEvent]:
    return engine.finish_step(now_s) if engine.start_step(now_s) else []


def export_prompt(p: Engine, name: str, prompt: bytes, now_s: float = 0.0) -> ExportedKv:
    """Compute this prompt on P; returns the export."""
    p.submit(request(name, prompt, kv_transfer=KvExportRequest(), arrival_s=now_s))
    end = step(p, now_s)[-1]
    assert isinstance(end, Finished)
    assert end.export is not None
    return end.export


def import_from(export: ExportedKv, p: Engine) -> KvImportRequest:
    return KvImportRequest(engine_id=p.engine_id, request_id=export.request_id, block_ids=export.block_ids)


def start_fetch(
    d: Engine, kv_transfer: KvImportRequest, *, prompt: bytes = PROMPT, now_s: float = 0.0
) -> KvFetch:
    """Submit a request with this KV transfer to D; returns the fetch that D starts."""
    d.submit(request("r-d", prompt, kv_transfer=kv_transfer, max_tokens=2, arrival_s=now_s))
    assert d.start_step(now_s) is None
    (fetch,) = d.take_kv_fetches()
    return fetch


def run_to_end(d: Engine, now_s: float = 1.0) -> tuple[list[bytes], Finished]:
    """Run D's only request to its end; returns the digest of each token, and the end."""
    events: list[EngineEvent] = []
    while more := step(d, now_s):
        events += more
    end = events[-1]
    assert isinstance(end, Finished)
    return [event.digest for event in events if isinstance(event, OutputToken)], end


def test_a_prefill_leg_ends_after_one_token_with_its_blocks_pinned() -> None:
    p = engine("p")
    export = export_prompt(p, "r-p", PROMPT)
    assert export == ExportedKv(request_id="r-p", block_ids=(0, 1, 2), tokens=10, expires_s=30.0)
    assert (p.gauges.kv_usage, p.gauges.leases, p.next_lease_expiry_s()) == (3 / 8, 1, 30.0)


def test_a_pulled_prompt_costs_the_decode_instance_one_step() -> None:
    p, d = engine("p"), engine("d")
    kv_transfer = import_from(export_prompt(p, "r-p", PROMPT), p)
    fetch = start_fetch(d, kv_transfer)
    assert fetch == KvFetch(
        request_id="r-d", source=kv_transfer, remote_block_ids=(0, 1, 2), tokens=10, kv_bytes=3 * 4 * 100
    )
    d.complete_kv_fetch(
        "r-d", pulled_digest(p.read_blocks(fetch.remote_block_ids), own_digest=prompt_digest(PROMPT)), 1.0
    )
    first = d.start_step(1.0)
    assert first is not None
    assert (first.prefill_tokens, first.decodes, first.context_tokens) == (0, 1, 10)
    d.finish_step(1.5)
    digests, end = run_to_end(d, 2.0)
    assert digests == [prompt_digest(PROMPT)]
    assert (end.computed_tokens, end.cached_tokens, end.external_tokens, end.queue_s) == (0, 0, 10, 1.0)
    assert (d.stats.prompt_external, d.stats.prompt_local_compute, d.stats.external_hits) == (10, 0, 10)


def test_a_fetch_delays_the_decodes_of_the_step_in_which_it_starts() -> None:
    """Here a step takes 1 s, and 1/1024 s for each token of context: sums are exact."""
    p, d = engine("p"), engine("d", t0=1.0, d1=0.0, d2=1 / 1024, fetch_start_s=0.25)
    d.submit(request("first", OTHER_PROMPT, max_tokens=9))
    step(d, 0.0)
    d.submit(
        request("r-d", PROMPT, kv_transfer=import_from(export_prompt(p, "r-p", PROMPT), p), max_tokens=2)
    )
    fetching = d.start_step(1.0)
    assert fetching is not None
    assert (fetching.duration_s, len(d.take_kv_fetches())) == (1.25 + 11 / 1024, 1)
    planned = d.plan_decode_run(1.0, fetching, steps_max=2)
    assert planned.ends_s == [1.0 + fetching.duration_s, 1.0 + fetching.duration_s + 1.0 + 12 / 1024]


def test_a_step_counts_at_most_as_many_fetches_as_requests_may_run() -> None:
    """So that a profile whose longest step is within the limit has none that is longer."""
    p, d = engine("p"), engine("d", t0=1.0, d1=0.0, d2=1 / 1024, fetch_start_s=0.25, max_seqs=2)
    d.submit(request("first", OTHER_PROMPT[:16], max_tokens=9))
    step(d, 0.0)
    kv_transfer = import_from(export_prompt(p, "r-p", PROMPT[:16]), p)
    for name in ("a", "b", "c"):
        d.submit(request(name, PROMPT[:16], kv_transfer=kv_transfer, max_tokens=2))
    fetching = d.start_step(1.0)
    assert fetching is not None
    assert (fetching.duration_s, len(d.take_kv_fetches())) == (1.5 + 5 / 1024, 3)


def test_only_blocks_missing_from_the_prefix_cache_are_pulled() -> None:
    p, d = engine("p"), engine("d")
    d.submit(request("before", PROMPT_WITH_SAME_START))
    step(d, 0.0)
    export = export_prompt(p, "r-p", PROMPT)
    fetch = start_fetch(d, import_from(export, p))
    assert (fetch.remote_block_ids, fetch.tokens) == (export.block_ids[1:], 6)
    d.complete_kv_fetch("r-d", prompt_digest(PROMPT), 1.0)
    _, end = run_to_end(d)
    assert (end.cached_tokens, end.external_tokens, end.computed_tokens) == (4, 6, 0)


def test_a_fetch_holds_blocks_and_shows_its_stages() -> None:
    p, d = engine("p"), engine("d", blocks=3)
    kv_transfer = import_from(export_prompt(p, "r-p", PROMPT), p)
    start_fetch(d, kv_transfer)
    d.submit(request("second", OTHER_PROMPT, kv_transfer=kv_transfer))
    assert d.start_step(0.1) is None
    gauges = d.gauges
    assert (gauges.fetch_waiting_to_start, gauges.fetch_in_progress, gauges.fetch_completed_waiting) == (
        1,
        1,
        0,
    )
    assert (gauges.waiting_capacity, gauges.waiting_deferred, gauges.waiting, gauges.kv_usage) == (
        1,
        1,
        2,
        1.0,
    )
    d.complete_kv_fetch("r-d", prompt_digest(PROMPT), 1.0)
    gauges = d.gauges
    assert (gauges.fetch_waiting_to_start, gauges.fetch_in_progress, gauges.fetch_completed_waiting) == (
        1,
        0,
        1,
    )


def test_after_a_failed_fetch_decode_computes_the_prompt() -> None:
    d = engine("d")
    start_fetch(d, KvImportRequest(engine_id="gone", request_id="r-p", block_ids=(0, 1, 2)))
    d.fail_kv_fetch("r-d", 5.0)
    digests, end = run_to_end(d, 6.0)
    assert digests == [prompt_digest(PROMPT)] * 2
    assert (end.computed_tokens, end.external_tokens, end.reason) == (10, 0, FinishReason.LENGTH)
    assert d.stats.failed_transfers == 1


def test_an_aborted_fetch_frees_its_blocks_and_its_late_result_is_ignored() -> None:
    d = engine("d")
    start_fetch(d, KvImportRequest(engine_id="p", request_id="r-p", block_ids=(0, 1, 2)))
    d.abort("r-d", 1.0)
    d.complete_kv_fetch("r-d", prompt_digest(PROMPT), 2.0)
    d.fail_kv_fetch("r-d", 2.0)
    assert (d.gauges.kv_usage, d.start_step(3.0), d.stats.failed_transfers) == (0.0, None, 0)


@pytest.mark.parametrize(
    ("heartbeats_s", "pulled_s", "in_time"),
    [
        pytest.param([], 29.9, True, id="in time"),
        pytest.param([], 30.0, False, id="the lease expires at its end"),
        pytest.param([25.0], 44.9, True, id="a heartbeat extends the lease to two thirds from then on"),
        pytest.param([25.0], 45.0, False, id="an extended lease expires too"),
        pytest.param([31.0], 32.0, False, id="a heartbeat after the end has no effect"),
    ],
)
def test_pinned_blocks_are_freed_by_the_pull_or_by_the_lease(
    heartbeats_s: list[float], pulled_s: float, in_time: bool
) -> None:
    p = engine("p")
    export_prompt(p, "r-p", PROMPT)
    for at_s in heartbeats_s:
        p.extend_lease("r-p", at_s)
    assert p.release_lease("r-p", pulled_s) is in_time
    late = 0 if in_time else 1
    assert (p.stats.expired_leases, p.stats.notifications_after_expiry) == (late, late)
    assert (p.gauges.kv_usage, p.next_lease_expiry_s()) == (0.0, None)


def test_an_early_heartbeat_leaves_the_lease_as_it_is() -> None:
    p = engine("p")
    export_prompt(p, "r-p", PROMPT)
    p.extend_lease("r-p", 5.0)
    assert p.next_lease_expiry_s() == 30.0


def test_a_waiting_prompt_runs_when_a_lease_has_freed_its_blocks() -> None:
    p = engine("p", blocks=3)
    export_prompt(p, "r-p", PROMPT)
    p.submit(request("next", OTHER_PROMPT))
    assert [bool(step(p, now_s)) for now_s in (29.0, 30.0)] == [False, True]


def test_an_expired_block_holds_its_prompt_until_it_is_reused() -> None:
    p = engine("p", blocks=6)
    export = export_prompt(p, "r-p", PROMPT)
    p.expire_leases(30.0)
    own = prompt_digest(PROMPT)
    unused = p.read_blocks(export.block_ids)
    p.submit(request("first", OTHER_PROMPT, arrival_s=31.0))
    step(p, 31.0)
    still = p.read_blocks(export.block_ids)
    p.submit(request("second", b"d" * 40, arrival_s=32.0))
    step(p, 32.0)
    reused = p.read_blocks(export.block_ids)
    assert (unused, still) == ((own,) * 3, (own,) * 3)
    assert pulled_digest(reused, own_digest=own) != own


@pytest.mark.parametrize("reused", [1, 2, 3])
def test_one_reused_block_makes_the_text_wrong(reused: int) -> None:
    p = engine("p", blocks=3)
    export = export_prompt(p, "r-p", PROMPT)
    p.expire_leases(30.0)
    p.submit(request("short", OTHER_PROMPT[: 16 * reused], arrival_s=31.0))
    step(p, 31.0)
    read = p.read_blocks(export.block_ids)
    assert pulled_digest(read, own_digest=prompt_digest(PROMPT)) != prompt_digest(PROMPT)


def test_a_prefix_written_by_another_prompt_reads_as_the_own_prompt() -> None:
    p = engine("p")
    export_prompt(p, "first", PROMPT_WITH_SAME_START)
    export = export_prompt(p, "r-p", PROMPT)
    assert p.read_blocks(export.block_ids) == (prompt_digest(PROMPT),) * 3


def test_the_last_block_counts_as_reused_even_if_a_longer_prompt_wrote_the_same_kv() -> None:
    p = engine("p", blocks=3)
    longer = PROMPT[:32] + OTHER_PROMPT[:4]
    export = export_prompt(p, "r-p", PROMPT[:32])
    p.expire_leases(30.0)
    for name, prompt in [("evicts the last block", OTHER_PROMPT[:32]), ("writes it again", longer)]:
        p.submit(request(name, prompt, arrival_s=31.0))
        step(p, 31.0)
    assert p.read_blocks(export.block_ids) == (prompt_digest(longer),) * 2


def test_the_same_prompt_in_another_block_order_reads_as_wrong_text() -> None:
    p = engine("p", blocks=3)
    export = export_prompt(p, "r-p", PROMPT)
    p.expire_leases(30.0)
    p.submit(request("again", PROMPT, block_hashes=()))  # takes the freed blocks, last one first
    step(p, 31.0)
    read = p.read_blocks(export.block_ids)
    assert pulled_digest(read, own_digest=prompt_digest(PROMPT)) != prompt_digest(PROMPT)


def test_decode_continues_the_prompt_whose_blocks_were_pulled() -> None:
    p, d = engine("p"), engine("d")
    fetch = start_fetch(d, import_from(export_prompt(p, "r-p", OTHER_PROMPT), p))
    held = pulled_digest(p.read_blocks(fetch.remote_block_ids), own_digest=prompt_digest(PROMPT))
    d.complete_kv_fetch("r-d", held, 1.0)
    assert run_to_end(d)[0] == [prompt_digest(OTHER_PROMPT)] * 2


def test_wrong_kv_stays_in_the_prefix_cache_of_the_decode_instance() -> None:
    d = engine("d")
    start_fetch(d, KvImportRequest(engine_id="p", request_id="r-p", block_ids=(0, 1, 2)))
    d.complete_kv_fetch("r-d", prompt_digest(OTHER_PROMPT), 1.0)
    run_to_end(d)
    d.submit(request("later", PROMPT))
    assert run_to_end(d, 3.0)[0] == [prompt_digest(OTHER_PROMPT)]


@pytest.mark.parametrize(
    "kv_transfer",
    [
        pytest.param(KvImportRequest(engine_id="p", request_id="r", block_ids=None), id="no block ids"),
        pytest.param(
            KvImportRequest(engine_id="p", request_id="r", block_ids=(0, 1)),
            id="fewer blocks than the prompt",
        ),
    ],
)
def test_malformed_kv_transfer_parameters_kill_the_engine(kv_transfer: KvImportRequest) -> None:
    d = engine("d")
    d.submit(request("r-d", PROMPT, kv_transfer=kv_transfer))
    for _ in range(2):
        with pytest.raises(EngineDead):
            d.start_step(0.0)
    assert d.dead


def test_parameters_without_a_remote_request_id_hang_and_kill_on_abort() -> None:
    d = engine("d")
    d.submit(
        request(
            "r-d", PROMPT, kv_transfer=KvImportRequest(engine_id="p", request_id=None, block_ids=(0, 1, 2))
        )
    )
    assert (d.start_step(0.0), d.take_kv_fetches(), d.gauges.fetch_in_progress) == (None, [], 1)
    with pytest.raises(EngineDead):
        d.abort("r-d", 9.0)
    assert d.dead


def test_more_blocks_than_needed_are_taken_from_the_end() -> None:
    d = engine("d")
    fetch = start_fetch(d, KvImportRequest(engine_id="p", request_id="r-p", block_ids=(7, 5, 3, 1)))
    assert fetch.remote_block_ids == (5, 3, 1)


def test_an_aborted_prefill_leg_exports_no_blocks() -> None:
    p = engine("p")
    p.submit(request("r-p", PROMPT, kv_transfer=KvExportRequest()))
    p.start_step(0.0)
    end = p.abort("r-p", 0.1)
    assert end is not None
    assert (end.export, p.gauges.kv_usage, p.finish_step(0.2)) == (None, 0.0, [])


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_that_does_not_exist_cannot_be_read(block: int) -> None:
    with pytest.raises(InvalidInput, match=r"is not one of the 8 KV blocks"):
        engine("p").read_blocks((0, block))


def test_reading_no_blocks_returns_no_digests() -> None:
    assert engine("p").read_blocks(()) == ()


def test_heartbeats_are_due_six_times_per_lease() -> None:
    assert engine("d").heartbeat_interval_s == 5.0


@pytest.mark.parametrize(
    ("one", "two", "shared"),
    [
        pytest.param((b"a" * 40, b""), (b"a" * 40, b""), 2, id="equal prompts share all full blocks"),
        pytest.param((b"a" * 40, b""), (b"a" * 16 + b"b" * 24, b""), 1, id="a common start is shared"),
        pytest.param(
            (b"a" * 40, b""),
            (b"b" * 16 + b"a" * 24, b""),
            0,
            id="equal blocks after a difference are not shared",
        ),
        pytest.param((b"a" * 40, b"x"), (b"a" * 40, b"y"), 0, id="different salts share nothing"),
        pytest.param((b"a" * 15, b""), (b"a" * 15, b""), 0, id="less than a block has no hash"),
    ],
)
def test_block_hashes_are_equal_as_far_as_prompts_are(
    one: tuple[bytes, bytes], two: tuple[bytes, bytes], shared: int
) -> None:
    pair = [block_hashes(prompt, block_bytes=16, salt=salt) for prompt, salt in (one, two)]
    assert len(set(pair[0]) & set(pair[1])) == shared
