"""Requests to real engines, and the token ids that they answer with."""

import json
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.engines.real import MODEL

_WORDS = (
    "quick",
    "brown",
    "fox",
    "jumps",
    "lazy",
    "dog",
    "seven",
    "pilots",
    "measure",
    "tired",
    "clocks",
    "rivers",
)


Way = tuple[str | None, str | None]
"""Who computed a prompt, and who answered."""


class Broken(Exception):
    """A stream that did not end as streams end; holds its last event."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str
    tokens: int = 12
    chat: bool = False
    stream: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Of the API."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """What is sent: no chance in it, and the ids of the tokens are asked for."""
        prompt = (
            {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        )
        return {
            "model": MODEL,
            **prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    tokens: tuple[int, ...]
    headers: dict[str, str]
    usage: dict[str, Any] | None = None
    text: str = ""

    @property
    def prefill(self) -> str | None:
        """Who computed the prompt; None: nobody before decode."""
        return self.headers.get("x-fulcrum-prefill")

    @property
    def decode(self) -> str | None:
        """Who answered."""
        return self.headers.get("x-fulcrum-decode")

    @property
    def way(self) -> Way:
        """Both."""
        return self.prefill, self.decode

    @property
    def local(self) -> str | None:
        """Why decode computed the prompt itself; None: it did not."""
        return self.headers.get("x-fulcrum-local-prefill")


def prompts(rng: random.Random, count: int, words: tuple[int, int] = (10, 120)) -> list[str]:
    """Prompts that begin differently: nothing of one is in a cache because of another."""
    lengths = [rng.randint(*words) for _ in range(count)]
    return [f"{rng.random()} " + " ".join(rng.choices(_WORDS, k=length)) for length in lengths]


def every_kind(rng: random.Random, count: int) -> list[Ask]:
    """Chat and completions, streaming and not, in turn."""
    return [
        Ask(prompt, rng.randint(8, 56), chat=number % 2 == 1, stream=number % 4 > 1)
        for number, prompt in enumerate(prompts(rng, count))
    ]


async def ask(client: httpx.AsyncClient, url: str, asked: Ask) -> Answer:
    """The whole answer.

    Raises:
        Broken: if a stream ends without its end.
    """
    if asked.stream:
        return await _streamed(client, url, asked)
    answer = await client.post(url + asked.path, json=asked.body())
    headers = dict(answer.headers)
    if answer.status_code != httpx.codes.OK:
        return Answer(answer.status_code, (), headers, text=answer.text)
    said = answer.json()
    return Answer(200, tuple(said["choices"][0]["token_ids"] or ()), headers, said["usage"], answer.text)


async def _streamed(client: httpx.AsyncClient, url: str, asked: Ask) -> Answer:
    tokens: list[int] = []
    usage, last = None, ""
    async with client.stream("POST", url + asked.path, json=asked.body()) as answer:
        headers = dict(answer.headers)
        if answer.status_code != httpx.codes.OK:
            return Answer(answer.status_code, (), headers, text=(await answer.aread()).decode())
        async for last in events(answer):
            if last == "[DONE]":
                continue  # the end of the body comes behind it
            event = json.loads(last)
            if "error" in event:
                raise Broken(last)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
    if last != "[DONE]":
        raise Broken(last)
    return Answer(200, tuple(tokens), headers, usage)


async def events(answer: httpx.Response) -> AsyncIterator[str]:
    """What stands in a stream's events. Only a line feed ends a line: answers may hold the other ends."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").decode()


def salted(asked: Ask, **more: Any) -> Ask:
    """The same, with a salt: nothing of it is in any cache."""
    return replace(asked, more={**asked.more, "cache_salt": secrets.token_hex(8), **more})


async def alone(client: httpx.AsyncClient, engine_url: str, asked: Ask) -> tuple[int, ...]:
    """What one engine answers that computes everything itself."""
    return (await ask(client, engine_url, salted(replace(asked, stream=False)))).tokens


async def prefilled(client: httpx.AsyncClient, engine_url: str, asked: Ask) -> dict[str, Any]:
    """The hand-off that an engine gives who is asked for it as the router asks."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {**replace(asked, tokens=1, stream=False).body(), "kv_transfer_params": params}
    handoff: dict[str, Any] = (await client.post(engine_url + asked.path, json=body)).json()
    return dict(handoff["kv_transfer_params"])


async def until_answered_by(
    way: Way, asking: Callable[[Ask], Awaitable[Answer]], asked: Ask, right: tuple[int, ...]
) -> None:
    """Asks the same over and over until an answer has come this way. Each has the right tokens."""
    took: Way | None = None
    while took != way:
        answer = await asking(salted(asked))
        assert (answer.status, answer.tokens) == (200, right)
        took = answer.way
