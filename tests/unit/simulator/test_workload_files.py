"""The published traces themselves have the figures that were published. Skipped without FULCRUM_TRACES."""

import os
from pathlib import Path

import pytest

from fulcrum_simulator.workload import leave_out_prefix_hits, load_trace

FOLDER = os.environ.get("FULCRUM_TRACES")

pytestmark = pytest.mark.skipif(FOLDER is None, reason="FULCRUM_TRACES does not name a folder of traces")


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output"),
    [("azure_code_2023", 8_819, 2_048, 28), ("lmsys_arena_multitenant", 1_500, 136, 256)],
)
def test_a_recording_has_the_figures_published_with_it(
    name: str, requests: int, mean_input: int, mean_output: int
) -> None:
    loaded = load_trace(Path(str(FOLDER)) / f"{name}.csv.gz").requests
    means = (
        round(sum(r.input_tokens for r in loaded) / len(loaded)),
        round(sum(r.output_tokens for r in loaded) / len(loaded)),
    )
    assert (len(loaded), *means) == (requests, mean_input, mean_output)


def test_an_endless_prefix_cache_serves_the_published_share_of_a_recording() -> None:
    loaded = load_trace(Path(str(FOLDER)) / "mooncake_conversation.csv.gz").requests
    left = sum(request.input_tokens for request in leave_out_prefix_hits(loaded))
    assert round(1 - left / sum(request.input_tokens for request in loaded), 3) == 0.374
