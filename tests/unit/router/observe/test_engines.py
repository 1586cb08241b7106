"""What is read from an engine's exposition."""

import pytest

from fulcrum_router.observe.engines import LatencySums, read_block_size, read_request_count, sum_samples

NAME = b"vllm:x_sum"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(b'vllm:x_sum{engine="0"} 1.5\n', 1.5, id="labels"),
        pytest.param(b"vllm:x_sum 2\n", 2.0, id="no labels"),
        pytest.param(b'vllm:x_sum{engine="0"} 1\nvllm:x_sum{engine="1"} 2\n', 3.0, id="several add up"),
        pytest.param(b"# HELP vllm:x_sum 9\nvllm:x_sum 1\n", 1.0, id="comments are passed over"),
        pytest.param(b"vllm:x_sum_more 5\nvllm:x_sum 1\n", 1.0, id="longer names are others"),
        pytest.param(b"vllm:x_sum 1 1700000000\n", 1.0, id="a time stamp"),
        pytest.param(b"vllm:x_sum 1", 1.0, id="no last newline"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"vllm:x_sum\n", None, id="no value"),
        pytest.param(b"vllm:x_sum NaN\n", None, id="NaN"),
        pytest.param(b'vllm:x_sum{a="}"} x\n', None, id="no number"),
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
            id="those that run and those that wait, each once",
        ),
        pytest.param(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", 0, id="none"),
        pytest.param(b"vllm:num_requests_running 0\n", None, id="one number alone says nothing"),
    ],
)
def test_running_and_waiting_requests_are_added(text: bytes, count: int | None) -> None:
    assert read_request_count(text) == count


@pytest.mark.parametrize(
    ("before", "now", "mean"),
    [
        pytest.param(LatencySums(1.0, 10), LatencySums(2.0, 30), 0.05, id="the mean of what came since"),
        pytest.param(None, LatencySums(2.0, 30), None, id="nothing to compare with"),
        pytest.param(LatencySums(2.0, 30), LatencySums(2.0, 30), None, id="no tokens"),
        pytest.param(LatencySums(2.0, 30), LatencySums(0.5, 3), None, id="a restart"),
    ],
)
def test_mean_itl_covers_only_the_tokens_since_the_last_read(
    before: LatencySums | None, now: LatencySums, mean: float | None
) -> None:
    assert now.mean_since(before) == (None if mean is None else pytest.approx(mean))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        pytest.param(
            b"# TYPE vllm:cache_config_info gauge\n"
            b'vllm:cache_config_info{_block_size_resolved="True",block_size="64",engine="0"} 1.0\nx 1\n',
            64,
            id="as vLLM says it",
        ),
        pytest.param(
            b'\nvllm:cache_config_info{engine="0"} 1.0\nx{block_size="3"} 1\n', None, id="of another"
        ),
        pytest.param(b'\nvllm:cache_config_info{block_size="None"} 1.0\n', None, id="no number"),
        pytest.param(b"x 1\n", None, id="nothing"),
    ],
)
def test_the_block_size_is_read_from_cache_config_info(text: bytes, size: int | None) -> None:
    assert read_block_size(text) == size
