"""Values that the router reads from an engine's metrics."""

import time

import pytest

from fulcrum_router.fleet.engine_metrics import (
    MAX_KV_TOKENS,
    MAX_SAMPLE,
    read_block_size,
    read_kv_capacity,
    read_request_counts,
    read_tokens_computed,
    read_wait_causes,
    sum_samples,
)
from fulcrum_router.http1.sending import MAX_RESPONSE_BYTES

NAME = b"vllm:x_sum"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(b'vllm:x_sum{engine="0"} 1.5\n', 1.5, id="sample with labels"),
        pytest.param(b"vllm:x_sum 2\n", 2.0, id="sample without labels"),
        pytest.param(b'vllm:x_sum{engine="0"} 1\nvllm:x_sum{engine="1"} 2\n', 3.0, id="several samples"),
        pytest.param(b"# HELP vllm:x_sum 9\nvllm:x_sum 1\n", 1.0, id="comment lines are ignored"),
        pytest.param(b"vllm:x_sum_more 5\nvllm:x_sum 1\n", 1.0, id="longer names are ignored"),
        pytest.param(b"vllm:x_sum 1 1700000000\n", 1.0, id="sample with a time stamp"),
        pytest.param(b"vllm:x_sum 1", 1.0, id="no newline at the end"),
        pytest.param(b"", None, id="no sample"),
        pytest.param(b"vllm:x_sum\n", None, id="sample without a value"),
        pytest.param(b"vllm:x_sum NaN\n", None, id="NaN"),
        pytest.param(b'vllm:x_sum{a="}"} x\n', None, id="value is not a number"),
        pytest.param(b"vllm:x_sum -1\n", None, id="negative value"),
        pytest.param(b'vllm:x_sum{a="1"} -1\nvllm:x_sum{a="2"} 3\n', None, id="one of two is negative"),
        pytest.param(b"vllm:x_sum %d\n" % MAX_SAMPLE, float(MAX_SAMPLE), id="largest value that is believed"),
        pytest.param(b"vllm:x_sum 1e300\n", None, id="value that no engine reaches"),
        pytest.param(b"vllm:x_sum +Inf\n", None, id="infinite value"),
    ],
)
def test_all_samples_of_one_name_are_summed(text: bytes, value: float | None) -> None:
    assert sum_samples(text, NAME) == value


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        pytest.param(
            b'vllm:num_requests_running{engine="0"} 2.0\n'
            b'vllm:num_requests_waiting{engine="0"} 1.0\n'
            b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0\n',
            (2, 1),
            id="running and waiting requests, each once",
        ),
        pytest.param(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", (0, 0), id="idle engine"),
        pytest.param(b"vllm:num_requests_running 0\n", None, id="unknown if one of both is missing"),
        pytest.param(
            b"vllm:num_requests_running 1e308\nvllm:num_requests_waiting 1e308\n",
            None,
            id="unknown if a value is one that no engine reaches",
        ),
    ],
)
def test_running_and_waiting_requests_are_counted(text: bytes, counts: tuple[int, int] | None) -> None:
    assert read_request_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param(
            b"# TYPE vllm:cache_config_info gauge\n"
            b'vllm:cache_config_info{_block_size_resolved="True",block_size="64",engine="0"} 1.0\nx 1\n',
            64,
            id="the line that vLLM writes",
        ),
        pytest.param(
            b'\nvllm:cache_config_info{engine="0"} 1.0\nx{block_size="3"} 1\n',
            None,
            id="label of another metric",
        ),
        pytest.param(b'\nvllm:cache_config_info{block_size="None"} 1.0\n', None, id="value is not a number"),
        pytest.param(b"x 1\n", None, id="no such metric"),
        pytest.param(
            b'\nvllm:cache_config_info{block_size="' + b"9" * 5000 + b'"} 1.0\n', None, id="too many digits"
        ),
    ],
)
def test_the_block_size_is_read_from_cache_config_info(text: bytes, size: int | None) -> None:
    assert read_block_size(text) == size


STAGES = b"""\
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="waiting_to_start"} 1.0
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 2.0
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="completed_waiting"} 4.0
"""
REASONS = b"""\
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 8.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 16.0
"""


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        pytest.param(
            STAGES + REASONS, (2.0, 12.0), id="fetching, and waiting for a place with KV or without"
        ),
        pytest.param(REASONS, None, id="an engine that fetches no KV"),
        pytest.param(b"", None, id="an older engine"),
    ],
)
def test_what_requests_wait_for_in_an_engine(text: bytes, causes: tuple[float, float] | None) -> None:
    assert read_wait_causes(text) == causes


CACHE = b'\nvllm:cache_config_info{block_size="%b",num_gpu_blocks="%b"} 1.0\n'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param(CACHE % (b"16", b"1000"), 16_000, id="blocks times their size"),
        pytest.param(CACHE % (b"16", b"None"), None, id="not known yet"),
        pytest.param(
            CACHE % (b"1024", b"%d" % (MAX_KV_TOKENS // 1024)), MAX_KV_TOKENS, id="largest that is believed"
        ),
        pytest.param(CACHE % (b"999999999", b"999999999"), None, id="cache that no engine has"),
        pytest.param(CACHE % (b"16", b"0"), None, id="no cache"),
    ],
)
def test_a_kv_cache_is_believed_if_an_engine_can_have_it(text: bytes, tokens: int | None) -> None:
    assert read_kv_capacity(text) == tokens


@pytest.mark.parametrize("value", [b"-1", b"1e308", b"NaN", b"-Inf"])
def test_no_number_of_an_engine_that_cannot_be_true_is_used(value: bytes) -> None:
    """A negative share of fetches would make the router's own counters of seconds fall."""
    names = (b"prompt_tokens_total", b"generation_tokens_total", b"num_requests_running")
    samples = b"".join(b"vllm:%b %b\n" % (name, value) for name in names)
    text = samples + STAGES.replace(b"2.0", value) + REASONS
    values = read_tokens_computed(text), read_request_counts(text), read_wait_causes(text)
    assert values == (None, None, None)


@pytest.mark.parametrize(
    "repeated",
    [
        pytest.param(b'vllm:x_sum{engine="0"} 1\n', id="samples"),
        pytest.param(b"vllm:x_sum_more 1\n", id="samples with a longer name"),
        pytest.param(b"vllm:x_sum", id="names"),
    ],
)
def test_a_page_that_repeats_a_name_without_end_is_not_read_to_its_end(repeated: bytes) -> None:
    page = repeated * (MAX_RESPONSE_BYTES // len(repeated))
    began_s = time.thread_time()
    assert sum_samples(page, NAME) is None
    assert time.thread_time() - began_s < 0.01


def test_of_a_line_with_endless_values_only_the_first_is_read() -> None:
    line = b"vllm:x_sum" + b" 1" * (MAX_RESPONSE_BYTES // 2)
    began_s = time.thread_time()
    assert sum_samples(line, NAME) == 1.0
    assert time.thread_time() - began_s < 0.03
