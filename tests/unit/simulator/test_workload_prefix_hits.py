"""Prompts are shortened by the leading blocks that an earlier prompt had, and by nothing else."""

import pytest

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload import WorkloadRequest, leave_out_prefix_hits
from fulcrum_simulator.workload.prefix_hits import find_block_tokens


def request(tokens: int, *blocks: int) -> WorkloadRequest:
    return WorkloadRequest(0.0, tokens, 1, blocks)


def test_leading_blocks_of_earlier_prompts_are_left_out() -> None:
    requests = [
        request(40, 1, 2, 3),
        request(35, 1, 2, 4),
        request(32, 5, 2),
    ]  # blocks of 16
    assert [each.input_tokens for each in leave_out_prefix_hits(requests)] == [40, 3, 32]


def test_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must have blocks of one size"):
        leave_out_prefix_hits([request(500, 1, 2, 3), request(512, 5)])


def test_one_token_is_left_of_a_prompt_that_came_before() -> None:
    requests = [request(40, 1, 2, 3), request(40, 1, 2, 3), request(40, 1, 2, 3)]
    assert [each.input_tokens for each in leave_out_prefix_hits(requests)] == [40, 1, 1]


def test_requests_without_block_ids_stay_as_they_are() -> None:
    requests = [request(40, 1, 2, 3), request(7)]
    assert leave_out_prefix_hits(requests) == requests


def test_the_block_size_follows_from_lengths_and_numbers_of_blocks() -> None:
    assert find_block_tokens([request(6758, *range(14)), request(513, 1, 2), request(3, 9)]) == 512
