"""Limits on the memory of requests: where they come from, and what is counted."""

import sys
from pathlib import Path

import orjson
import pytest

from fulcrum_router.http1.limits import (
    LARGE_BODY_BYTES,
    LARGE_SHARE,
    MAX_HELD_BYTES,
    MIN_HELD_BYTES,
    SHORT_HELD_SHARE,
    TENANT_KEPT_SHARE,
    UNFINISHED_SHARE,
    UNSENT_SHARE,
    KeptBytes,
    RequestMemory,
    compute_max_held_bytes,
    estimate_parsed_bytes,
    find_memory_limit,
)

MIB = 1024 * 1024


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "536870912\n"}, 512 * MIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/memory.max": "1000\n",
                "sys/fs/cgroup/pods/one/memory.max": "2000\n",
            },
            1000,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory,hugetlb:/docker/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "268435456\n",
            },
            256 * MIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
        ),
    ],
    ids=["no cgroups", "version 2", "no limit", "a limit around it", "version 1", "version 1 without limit"],
)
def test_the_memory_of_the_container_is_found(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert find_memory_limit(write_files(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("limit", "machine", "held"),
    [
        (512 * MIB, 64 * 1024 * MIB, 192 * MIB),
        (192 * MIB, 64 * 1024 * MIB, MIN_HELD_BYTES),
        (8 * 1024 * MIB, 64 * 1024 * MIB, MAX_HELD_BYTES),
        (None, 1024 * MIB, 128 * MIB),
        (None, 64 * 1024 * MIB, MAX_HELD_BYTES),
    ],
    ids=["512 MiB", "hardly enough", "plenty", "a small machine", "a large machine"],
)
def test_requests_may_take_half_of_the_memory_that_the_program_leaves(
    limit: int | None, machine: int, held: int
) -> None:
    assert compute_max_held_bytes(limit, machine_bytes=machine) == held


def test_large_and_unfinished_bodies_leave_room_for_others() -> None:
    memory = RequestMemory(1_000)
    large = int(1_000 * LARGE_SHARE)
    assert memory.hold(large, body_bytes=LARGE_BODY_BYTES + 1)
    assert not memory.hold(1, body_bytes=LARGE_BODY_BYTES + 1)
    unfinished = int(1_000 * UNFINISHED_SHARE)
    assert memory.hold_unfinished(unfinished)
    assert not memory.hold_unfinished(1)
    assert memory.hold(1_000 - large, body_bytes=10)
    assert (memory.held_bytes, memory.unfinished_bytes, memory.refusals) == (1_000, unfinished, 2)


def test_unsent_responses_and_bodies_leave_room_for_each_other() -> None:
    memory = RequestMemory(1_000, limit_bytes=10_000)
    assert memory.hold(1_000, body_bytes=1)
    unsent = int(1_000 * UNSENT_SHARE)
    assert memory.hold_unsent(unsent)
    assert not memory.hold_unsent(1)
    assert (memory.held_bytes, memory.unsent_bytes, memory.refusals) == (1_000, unsent, 1)
    memory.unsent_bytes = 0
    memory.check(9_000)
    assert not memory.hold_unsent(int(1_000 * SHORT_HELD_SHARE) + 1)


def test_a_tenant_alone_keeps_all_bytes_but_the_share_of_another() -> None:
    kept = KeptBytes(1_000)
    share = int(TENANT_KEPT_SHARE * 1_000)
    assert kept.keep(1_000 - share, tenant="a")
    assert not kept.keep(1, tenant="a")
    assert kept.keep(share, tenant="b")
    assert not kept.keep(1, tenant="c")
    kept.release(share, tenant="a")
    assert not kept.keep(1, tenant="b"), "the free share is left for others"
    assert kept.keep(share, tenant="c")
    assert kept.kept_bytes == 1_000


def test_requests_without_a_tenant_keep_all_bytes() -> None:
    kept = KeptBytes(1_000)
    assert kept.keep(1_000, tenant="")
    assert not kept.keep(1, tenant="")


def test_little_is_accepted_while_the_process_is_short_of_memory() -> None:
    memory = RequestMemory(1_000, limit_bytes=10_000)
    memory.check(9_000)
    assert not memory.hold(int(1_000 * SHORT_HELD_SHARE) + 1, body_bytes=1)
    assert memory.hold(int(1_000 * SHORT_HELD_SHARE), body_bytes=1)
    memory.check(8_000)
    assert memory.hold(800, body_bytes=1)


@pytest.mark.parametrize(
    ("body", "times"),
    [
        (orjson.dumps({"prompt": "x" * 1_000_000}), range(2, 3)),
        (orjson.dumps({"prompt": list(range(100_000, 200_000))}), range(11, 12)),
        (b'{"a":[' + b"[]," * 30_000 + b"1]}", range(44, 46)),
        (b'{"prompt":"x"}', range(3, 4)),
    ],
    ids=["text", "token ids", "empty arrays", "short"],
)
def test_parsed_values_are_counted(body: bytes, times: range) -> None:
    assert int(estimate_parsed_bytes(body, few_held=True) / len(body)) in times


def test_small_dense_bodies_take_little_more_memory_than_they_may() -> None:
    body = b'{"a":[' + b"[]," * 5_000 + b"1]}"
    parsed = orjson.loads(body)
    parsed_bytes = sys.getsizeof(parsed["a"]) + sum(map(sys.getsizeof, parsed["a"]))
    memory, bodies = RequestMemory(32 * 1024 * 1024), 0
    while memory.hold(
        len(body) + estimate_parsed_bytes(body, few_held=memory.holds_few), body_bytes=len(body)
    ):
        bodies += 1
    assert bodies * (2 * len(body) + parsed_bytes) < 1.5 * memory.max_bytes
