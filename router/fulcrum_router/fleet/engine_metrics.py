"""Read an engine's `/metrics` and `/v1/models`: a request to one engine, and the values that the router uses.

`observe.engines` reads every engine once a second; `data_path` reads expired transfers during a lease check.
"""

import re
from itertools import repeat

from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.bodies import MAX_PROMPT_TOKENS
from fulcrum_router.http1.failures import LegFailed
from fulcrum_router.http1.inline_task import run_inline
from fulcrum_router.http1.json_limits import InvalidBody, parse_limited_object
from fulcrum_router.http1.sending import send_request
from fulcrum_router.http1.upstream import ConnectionPool

RESPONSE_TIMEOUT_S = 1.0
"""Time to connect, and then to respond, of a request for metrics or health, in seconds."""

ITL_SUM = b"vllm:inter_token_latency_seconds_sum"
ITL_COUNT = b"vllm:inter_token_latency_seconds_count"
KV_USAGE = b"vllm:kv_cache_usage_perc"
EXPIRED_TRANSFERS = b"vllm:nixl_num_kv_expired_reqs_total"
_PROMPT_TOKENS, _OUTPUT_TOKENS = b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total"
_RUNNING, _WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
_WAITING_BY_REASON = b"vllm:num_requests_waiting_by_reason"
_KV_FETCHES_BY_STAGE = b"vllm:num_requests_kv_fetch_by_stage"
_CACHE_CONFIG = b"\nvllm:cache_config_info{"
_BLOCK_SIZE = re.compile(rb'\bblock_size="(\d{1,9})"')
_KV_BLOCKS = re.compile(rb'\bnum_gpu_blocks="(\d{1,9})"')
MAX_SAMPLE = 2**53
"""A larger value is not believed: no engine counts so far, and products of such values are finite."""
MAX_SAMPLES = 1_024
"""Occurrences of one metric's name, those in comments and in longer names included; a page with more is not
believed. No other request is served while they are read, and an engine has a few of each.
"""
MAX_KV_TOKENS = 2**30
"""A larger KV cache is not believed: at 16 KB a token, as of a model of 1 billion parameters, it is 17 TB."""


def sum_samples(text: bytes, name: bytes, *, label: bytes = b"") -> float | None:
    """Add up all samples of one metric in an exposition; with `label`, those that have it.

    None: there is no sample, its name occurs more than `MAX_SAMPLES` times, or one is not a number from 0 to
    `MAX_SAMPLE`. All metrics of an engine that the router reads are counts, times or shares.
    """
    total, found, start = 0.0, False, 0
    for _ in repeat(None, MAX_SAMPLES + 1):
        start = text.find(name, start)
        if start < 0:
            return total if found else None
        found_at, start = start, start + len(name)
        at_line_start = found_at == 0 or text[found_at - 1 : found_at] == b"\n"
        if not at_line_start or text[start : start + 1] not in (b"{", b" "):
            continue  # a comment, or a longer name
        end = text.find(b"\n", start)
        line = text[found_at : end if end >= 0 else len(text)]
        if label not in line:
            continue
        try:
            value = float(
                line.rpartition(b"}")[2].split(None, 1)[0] if b"}" in line else line.split(None, 2)[1]
            )
        except (ValueError, IndexError):
            return None
        if not 0.0 <= value <= MAX_SAMPLE:
            return None
        total += value
        found = True
    return None


def read_request_counts(text: bytes) -> tuple[int, int] | None:
    """Read how many requests run and how many wait in an engine; None if the exposition lacks either."""
    running, waiting = sum_samples(text, _RUNNING), sum_samples(text, _WAITING)
    return None if running is None or waiting is None else (int(running), int(waiting))


def read_tokens_computed(text: bytes) -> float | None:
    """Read how many prompt and output tokens an engine has computed; None if either is missing."""
    prompt, output = sum_samples(text, _PROMPT_TOKENS), sum_samples(text, _OUTPUT_TOKENS)
    return None if prompt is None or output is None else prompt + output


def read_wait_causes(text: bytes) -> tuple[float, float] | None:
    """Read how many requests of an engine fetch KV, and how many wait for a place in its batch.

    None: the exposition does not contain it, as that of vLLM before 0.18 or of an engine that fetches no KV.
    """
    fetching = sum_samples(text, _KV_FETCHES_BY_STAGE, label=b'stage="in_progress"')
    fetched = sum_samples(text, _KV_FETCHES_BY_STAGE, label=b'stage="completed_waiting"')
    queued = sum_samples(text, _WAITING_BY_REASON, label=b'reason="capacity"')
    return None if fetching is None or queued is None else (fetching, queued + (fetched or 0.0))


def read_block_size(text: bytes) -> int | None:
    """Read the engine's KV block size in tokens; None if the exposition does not contain it."""
    return _read_cache_config(text, _BLOCK_SIZE)


def read_kv_capacity(text: bytes) -> int | None:
    """Read how many tokens the engine's KV cache holds.

    None: the exposition does not contain it, or not from 1 to `MAX_KV_TOKENS`. The autoscaler takes the mean
    of all instances, which one infinite cache would make infinite.
    """
    size, blocks = read_block_size(text), _read_cache_config(text, _KV_BLOCKS)
    tokens = 0 if size is None or blocks is None else size * blocks
    return tokens if 0 < tokens <= MAX_KV_TOKENS else None


def _read_cache_config(text: bytes, label: re.Pattern[bytes]) -> int | None:
    start = text.find(_CACHE_CONFIG) + 1
    found = label.search(text, start, text.find(b"\n", start)) if start else None
    return int(found[1]) if found else None


def read_context_tokens(page: bytes) -> int | None:
    """Read the longest context of an engine from its list of models; None: it names none that is plausible.

    A longer one than any prompt would let each prompt count in full for all engines of the service.
    """
    try:
        models = parse_limited_object(page).get("data")
    except InvalidBody:
        return None
    lengths = (m.get("max_model_len") for m in models if type(m) is dict) if type(models) is list else ()
    plausible = (n for n in lengths if type(n) is int and 0 < n <= MAX_PROMPT_TOKENS)
    return max(plausible, default=None)


async def fetch_expired_transfers(instance: Instance) -> float | None:
    """Fetch how many KV transfers from this instance have expired since its engine started.

    None: there was no response, the engine does not report the number, or the endpoint changed meanwhile.
    """
    pool = instance.connection_pool
    if pool is None:
        return None
    try:
        status, text = await fetch_page(pool, b"/metrics")
    except LegFailed:
        return None
    if status != 200 or instance.connection_pool is not pool:
        return None
    return sum_samples(text, EXPIRED_TRANSFERS)


async def fetch_page(pool: ConnectionPool, path: bytes) -> tuple[int, bytes]:
    """Fetch a page of an engine: status and content.

    Raises:
        LegFailed: if connecting, or the response after it, takes longer than `RESPONSE_TIMEOUT_S`.
    """
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (path, pool.address)
    request = send_request(
        pool,
        head,
        b"",
        connect_timeout_s=RESPONSE_TIMEOUT_S,
        response_timeout_s=RESPONSE_TIMEOUT_S,
        retryable=False,
    )
    status, content, _ = await run_inline(request)
    return status, content
