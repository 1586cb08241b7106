"""Responses of an engine server to valid and invalid requests, and to invalid command lines."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fulcrum_simulator.text import output_text, output_token, prompt_digest, render_chat
from tests.integration.simulator.servers import (
    BLOCK_TOKENS,
    BLOCKS,
    DEADLINE_S,
    MODEL,
    PREFILL_ONLY,
    Client,
    Server,
    Start,
    expected_text,
    launch,
    prompt_of,
)

_UNFINISHED_CHOICE = {"logprobs": None, "finish_reason": None}
_LAST_CHOICE = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
MODEL_CARD = {
    "id": MODEL,
    "object": "model",
    "owned_by": "vllm",
    "root": MODEL,
    "parent": None,
    "max_model_len": BLOCK_TOKENS * BLOCKS,
}


class TestResponses:
    async def test_a_stream_has_one_event_a_token_then_usage_then_done(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        body = {"prompt": "stream this", "max_tokens": 5, "stream_options": {"include_usage": True}}
        *tokens, usage, done = await client.stream(pair[0], "/v1/completions", body)
        chunks = [json.loads(event)["choices"][0] for event in tokens]
        assert "".join(chunk["text"] for chunk in chunks) == expected_text("stream this", 5)
        assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, None, "length"]
        assert json.loads(usage)["choices"] == []
        assert json.loads(usage)["usage"]["completion_tokens"] == 5
        assert done == "[DONE]"

    async def test_a_chat_stream_opens_with_the_role_and_has_the_id_of_the_client(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "max_tokens": 2}
        headers = {"X-Request-Id": "trace-1"}
        *events, done = await client.stream(pair[0], "/v1/chat/completions", body, headers=headers)
        texts = [output_token(prompt_digest(render_chat(messages)), index) for index in range(2)]
        chunks = [json.loads(event) for event in events]
        assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {
            ("chatcmpl-trace-1", "chat.completion.chunk")
        }
        assert [chunk["choices"] for chunk in chunks] == [
            [{"index": 0, "delta": {"role": "assistant", "content": ""}} | _UNFINISHED_CHOICE],
            [{"index": 0, "delta": {"content": texts[0]}} | _UNFINISHED_CHOICE],
            [{"index": 0, "delta": {"content": texts[1]}} | _LAST_CHOICE],
        ]
        assert done == "[DONE]"

    @pytest.mark.parametrize("prompt", ["hello", "Tell the cat", "x"])
    async def test_a_prompt_that_ends_with_output_gets_the_rest_of_it(
        self, client: Client, pair: tuple[Server, Server], prompt: str
    ) -> None:
        whole = expected_text(prompt, 6)
        body = {"prompt": prompt + expected_text(prompt, 2), "max_tokens": 4}
        _, response = await client.post(pair[0], "/v1/completions", body)
        assert expected_text(prompt, 2) + response["choices"][0]["text"] == whole

    async def test_the_final_message_of_a_chat_can_be_continued(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        messages = [{"role": "user", "content": "hello"}]
        digest = prompt_digest(render_chat(messages))
        final = {"role": "assistant", "content": output_text(digest, 3)}
        body = {"messages": [*messages, final], "max_tokens": 2, "continue_final_message": True}
        refused, _ = await client.post(pair[0], "/v1/chat/completions", body)
        body["add_generation_prompt"] = False
        status, response = await client.post(pair[0], "/v1/chat/completions", body)
        texts = (output_text(digest, 3), response["choices"][0]["message"]["content"])
        assert (refused, status, "".join(texts)) == (400, 200, output_text(digest, 5))

    async def test_a_chat_response_and_the_parameters_of_its_prefill_leg_have_the_id_of_the_client(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "max_tokens": 1, "kv_transfer_params": PREFILL_ONLY}
        headers = {"X-Request-Id": "trace-2"}
        status, response = await client.post(pair[0], "/v1/chat/completions", body, headers=headers)
        content = output_text(prompt_digest(render_chat(messages)), 1)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "tool_calls": []}
        assert (status, response["id"], response["object"]) == (200, "chatcmpl-trace-2", "chat.completion")
        assert response["choices"] == [{"index": 0, "message": message} | _LAST_CHOICE]
        assert re.fullmatch(
            r"chatcmpl-trace-2-[0-9a-f]{8}", response["kv_transfer_params"]["remote_request_id"]
        )
        await client.inject_fault(pair[0], "expire_leases")

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/version", {"version": "0.32.0"}),
            ("/load", {"server_load": 0}),
            ("/v1/models", {"object": "list", "data": [MODEL_CARD]}),
        ],
    )
    async def test_version_load_and_models_respond_as_vllm(
        self, client: Client, pair: tuple[Server, Server], path: str, expected: dict[str, Any]
    ) -> None:
        response = await client.get(pair[0], path)
        for card in response.get("data", []):
            card.pop("created")
        assert response == expected

    async def test_tokens_can_be_counted_before_they_are_sent(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        status, response = await client.post(pair[0], "/tokenize", {"model": MODEL, "prompt": "abcdef"})
        assert (status, response["count"], len(response["tokens"])) == (200, 2, 2)
        assert response["max_model_len"] == BLOCK_TOKENS * BLOCKS

    async def test_a_prompt_seen_before_is_cached_up_to_its_last_block(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        prompt = prompt_of("seen before")
        first = await client.complete(pair[0], prompt, 1)
        second = await client.complete(pair[0], prompt, 1)
        salted = await client.complete(pair[0], prompt, 1, cache_salt="fresh")
        assert [
            response["usage"]["prompt_tokens_details"]["cached_tokens"]
            for response in (first, second, salted)
        ] == [0, 96, 0]

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            pytest.param({"prompt": "x", "model": "other"}, 404, id="another model"),
            pytest.param({"prompt": ""}, 400, id="an empty prompt"),
            pytest.param({}, 400, id="no prompt"),
            pytest.param(
                {"prompt": "x" * 4 * BLOCK_TOKENS * BLOCKS}, 400, id="a prompt longer than the model takes"
            ),
            pytest.param({"prompt": "x", "max_tokens": 0}, 400, id="max_tokens of 0"),
            pytest.param({"prompt": "x", "max_tokens": 10_000}, 400, id="more tokens than fit"),
            pytest.param({"prompt": "x", "max_tokens": "many"}, 400, id="max_tokens that is not a number"),
            pytest.param({"prompt": "x", "n": 2}, 400, id="two choices"),
            pytest.param(
                {"prompt": "x", "kv_transfer_params": [1]}, 400, id="parameters that are not an object"
            ),
            pytest.param({"prompt": "x", "stream_options": {}}, 400, id="stream options without a stream"),
        ],
    )
    async def test_an_invalid_request_is_refused_with_an_error_object(
        self, client: Client, pair: tuple[Server, Server], body: dict[str, Any], status: int
    ) -> None:
        got, response = await client.post(pair[0], "/v1/completions", {"model": MODEL, **body})
        assert (got, response["error"]["code"]) == (status, status)
        assert set(response["error"]) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize("params", [{}, {"unknown": 1}, {"do_remote_prefill": False}, None])
    async def test_harmless_parameters_mean_a_plain_request(
        self, client: Client, pair: tuple[Server, Server], params: dict[str, Any] | None
    ) -> None:
        response = await client.complete(pair[0], "plain", 2, kv_transfer_params=params)
        assert (response["choices"][0]["text"], response["kv_transfer_params"]) == (
            expected_text("plain", 2),
            None,
        )


class TestBadStart:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param(["--port", "70000"], "--port (70000) is not between 0 and 65535", id="port"),
            pytest.param(["--lease-s", "0"], "--lease-s (0.0) must be positive", id="lease"),
            pytest.param(["--flavour", "x"], "unrecognized arguments: --flavour x", id="argument"),
            pytest.param(["--profile", "none"], "profile (none) is not one of", id="profile"),
        ],
    )
    def test_bad_arguments_exit_with_one_line_and_code_2(
        self, profile_file: Path, arguments: list[str], message: str
    ) -> None:
        process = launch(profile_file, *arguments)
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"error: {message}")

    def test_a_port_in_use_exits_with_one_line_and_code_2(
        self, profile_file: Path, pair: tuple[Server, Server]
    ) -> None:
        port = pair[0].port
        process = launch(profile_file, "--port", str(port))
        out, errors = process.communicate(timeout=DEADLINE_S)
        expected = f"error: --port (127.0.0.1:{port}) cannot be bound: {os.strerror(98).lower()}\n"
        assert (process.returncode, out, errors) == (2, "", expected)


class TestRoleAtStart:
    @pytest.mark.parametrize(
        ("role", "statuses"),
        [
            pytest.param("prefill", (200, 400, 400), id="a prefill engine refuses to decode"),
            pytest.param("decode", (400, 200, 200), id="a decode engine refuses prefill legs"),
        ],
    )
    async def test_an_engine_of_one_role_refuses_requests_of_the_other(
        self,
        client: Client,
        start: Start,
        pair: tuple[Server, Server],
        role: str,
        statuses: tuple[int, int, int],
    ) -> None:
        server = start("--role", role)
        kv_transfer_params = await client.prefill(pair[0], "prefilled")
        received = []
        for params in (PREFILL_ONLY, None, kv_transfer_params):
            body = {"model": MODEL, "prompt": "prefilled", "max_tokens": 1, "kv_transfer_params": params}
            status, _ = await client.post(server, "/v1/completions", body)
            received.append(status)
        assert tuple(received) == statuses
