"""Values that the router reads from an engine's metrics."""

import pytest

from fulcrum_router.fleet.engine_metrics import (
    read_block_size,
    read_request_count,
    read_wait_causes,
    sum_samples,
)

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
    ],
)
def test_all_samples_of_one_name_are_summed(text: bytes, value: float | None) -> None:
    assert sum_samples(text, NAME) == value


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(
            b'vllm:num_requests_running{engine="0"} 2.0\n'
            b'vllm:num_requests_waiting{engine="0"} 1.0\n'
            b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0\n',
            3,
            id="running and waiting requests, each once",
        ),
        pytest.param(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", 0, id="idle engine"),
        pytest.param(b"vllm:num_requests_running 0\n", None, id="unknown if one of both is missing"),
        pytest.param(
            b"vllm:num_requests_running 1e308\nvllm:num_requests_waiting 1e308\n",
            None,
            id="unknown if the sum is not finite",
        ),
    ],
)
def test_running_and_waiting_requests_are_added(text: bytes, count: int | None) -> None:
    assert read_request_count(text) == count


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
