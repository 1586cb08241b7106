"""The hashes of a prompt's beginning: what two requests share, and what keeps them apart."""

import time
from typing import Any

import orjson
import pytest

from fulcrum_router.http1.bodies import parse_request_body
from fulcrum_router.http1.prompt_prefix import BLOCK_ENDS, build_prefix
from fulcrum_router.policy.prefix_index import NO_PREFIX, PromptPrefix

SYSTEM = {"role": "system", "content": "You are helpful. " * 400}


def hash_prompt(*, chat: bool = True, tokens: int = 2000, **fields: Any) -> PromptPrefix:
    raw = orjson.dumps({"model": "m", **fields})
    return build_prefix(parse_request_body(raw, 0, chat=chat), tokens=tokens, chat=chat)


def chat(*texts: str, **fields: Any) -> PromptPrefix:
    """A chat that begins with the system prompt."""
    turns = [{"role": "user", "content": text} for text in texts]
    return hash_prompt(messages=[SYSTEM, *turns], **fields)


def count_shared(first: PromptPrefix, second: PromptPrefix) -> int:
    pairs = zip(first.hashes, second.hashes, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first.hashes), len(second.hashes)))


def test_chats_with_one_system_prompt_share_its_blocks() -> None:
    shared = count_shared(chat("one " * 2000), chat("two " * 2000))
    assert BLOCK_ENDS[shared - 1] <= len(orjson.dumps([SYSTEM])) < BLOCK_ENDS[shared + 1]


def test_the_next_turn_shares_the_blocks_of_the_turn_before() -> None:
    last = chat("one " * 2000)
    assert count_shared(last, chat("one " * 2000, "two " * 500)) >= len(last.hashes) - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "adapter"},
        {"cache_salt": "mine"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ],
    ids=["another model or adapter", "another salt", "other tools", "other template arguments"],
)
def test_requests_that_an_engine_caches_apart_share_nothing(fields: dict[str, Any]) -> None:
    assert count_shared(chat("one"), chat("one", **fields)) == 0


def test_sampling_options_change_nothing() -> None:
    assert chat("one").hashes == chat("one", temperature=0.5, max_tokens=7, stream=True).hashes


def test_another_image_ends_the_shared_part() -> None:
    def ask(url: str) -> PromptPrefix:
        image = {"type": "image_url", "image_url": {"url": url}}
        text = {"type": "text", "text": "What is it? " * 500}
        return hash_prompt(messages=[SYSTEM, {"role": "user", "content": [image, text]}])

    shared = count_shared(ask("http://x/1.png"), ask("http://x/2.png"))
    assert 0 < shared < len(ask("http://x/1.png").hashes)


def test_token_ids_are_hashed_like_text() -> None:
    ids = list(range(1000, 2000))
    first, second = (hash_prompt(chat=False, prompt=[*ids, last]) for last in (5, 6))
    assert count_shared(first, second) >= len(first.hashes) - 1 > 0


def test_tokens_follow_from_the_share_of_the_bytes() -> None:
    prompt = hash_prompt(chat=False, prompt="word " * 1638 + "a", tokens=2048)
    assert prompt.count_tokens(len(prompt.hashes)) == pytest.approx(2048, abs=260)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "short"},
        {"prompt": ["long " * 1000] * 2},
        {"prompt": "long " * 1000, "prompt_embeds": "AAAA"},
        {"prompt": "long " * 1000, "truncate_prompt_tokens": 64},
    ],
    ids=["a short prompt", "several prompts", "embeddings", "a prompt that is cut at its beginning"],
)
def test_prompts_without_a_comparable_beginning_have_no_prefix(fields: dict[str, Any]) -> None:
    assert hash_prompt(chat=False, **fields) is NO_PREFIX


def test_the_longest_prompt_has_few_blocks() -> None:
    assert sum(end <= 8 << 20 for end in BLOCK_ENDS) < 100


@pytest.mark.parametrize("name", ["model", "cache_salt"])
def test_a_name_that_is_a_long_list_is_hashed_without_writing_it_as_python_text(name: str) -> None:
    fields = {"prompt": "x" * 600, name: [0.1234567890123] * 190_000}  # 70 ms as text
    body = parse_request_body(orjson.dumps(fields), 0)
    began_s = time.thread_time()
    assert str(fields[name])
    as_text_s, began_s = time.thread_time() - began_s, time.thread_time()
    assert build_prefix(body, tokens=150, chat=False) is not NO_PREFIX
    assert time.thread_time() - began_s < as_text_s / 2
