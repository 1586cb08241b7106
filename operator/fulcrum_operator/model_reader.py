"""`python -m fulcrum_operator.model_reader`: read a model's config.json where the engines find the model.

Runs once, in a pod of its own: only that pod mounts the claim and has the hub token, never the operator. The
pod's termination message is the result: the excerpt as JSON with exit code 0, or one line with the reason
with exit code 1.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import httpx

from fulcrum_cluster.process import ArgumentParser
from fulcrum_core.models import excerpt_config

DEFAULT_HUB_URL = "https://huggingface.co"
"""Hub that engines use unless `HF_ENDPOINT` is set."""
REPORT_BYTES_MAX = 4096
"""Maximum size of a termination message in Kubernetes."""

_CONFIG_BYTES_MAX = 4 * 2**20
"""Largest file that is read; a config.json has a few kilobytes."""
_TIMEOUT_S = 10.0
_RETRY_PAUSES_S = (1.0, 4.0)
"""Pauses before the retries of a request that failed for a temporary reason, in seconds."""
_HUB_MODEL_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_TOKEN_REQUIRED = "no such model, or a token is required: name its Secret in spec.modelSource.tokenSecret"
_TOKEN_ERRORS = {
    401: "the hub does not accept the token in spec.modelSource.tokenSecret or the variable HF_TOKEN",
    403: "the token has no access to the model",
}
_NOT_FOUND_ERRORS = {
    "RepoNotFound": "no such model, or the token has no access to it",
    "RevisionNotFound": "the model has no such revision",
    "EntryNotFound": "the model has no such file",
}
"""Reasons for a status 404, by the header X-Error-Code of Hugging Face; other hubs do not send it."""


class ConfigUnreadable(Exception):
    """config.json cannot be read; the message is the reason in one line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the excerpt, or the reason why there is none, as the termination message."""
    args = _parser().parse_args(argv)
    try:
        text, code = excerpt_report(_read(args, os.environ)), 0
    except ConfigUnreadable as error:
        reason = " ".join(str(error).split())
        text, code = reason[: REPORT_BYTES_MAX // 4], 1  # a character takes four bytes at most
    print(text, flush=True)
    try:
        args.report.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"{args.report}: {error.strerror}: the result cannot be written", flush=True)
        code = 1
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="fulcrum_operator.model_reader", description="Reads a model's config.json.")
    add = parser.add_argument
    model_location = parser.add_mutually_exclusive_group(required=True)
    model_location.add_argument("--folder", type=Path, help="folder of the model")
    model_location.add_argument(
        "--model", help="name of the model at the hub (its address: HF_ENDPOINT; HF_TOKEN)"
    )
    add("--revision", default="main", help="branch, tag or commit at the hub (default: main)")
    add("--report", type=Path, default=Path("/dev/termination-log"), help="file for the termination message")
    return parser


def _read(args: argparse.Namespace, env: Mapping[str, str]) -> bytes:
    if args.folder is not None:
        return read_folder(args.folder)
    hub, token = env.get("HF_ENDPOINT") or DEFAULT_HUB_URL, env.get("HF_TOKEN", "")
    return read_hub(args.model, args.revision, hub=hub, token=token)


def read_folder(folder: Path) -> bytes:
    """The content of the config.json in a model's folder.

    Raises:
        ConfigUnreadable: if the file is missing, too large or cannot be read.
    """
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            return _check_length(file.read(_CONFIG_BYTES_MAX + 1), str(path))
    except OSError as error:
        raise ConfigUnreadable(f"{path}: {error.strerror or error}{_describe_folder(folder)}") from error


def _describe_folder(folder: Path) -> str:
    """Files in the folder, because the usual mistake is a wrong level or a misspelled name."""
    existing = folder if folder.is_dir() else folder.parent
    try:
        names = sorted(entry.name for entry in existing.iterdir())[:5]
    except OSError:
        return ""
    return f"; {existing} contains {', '.join(names)}" if names else f"; {existing} is empty"


def read_hub(
    model: str,
    revision: str,
    *,
    hub: str,
    token: str = "",
    pause: Callable[[float], None] = time.sleep,
) -> bytes:
    """The content of a model's config.json at the hub.

    Args:
        model: Name of the model at the hub.
        revision: Branch, tag or commit.
        hub: Base URL of the hub.
        token: Access token; empty to send none.
        pause: Called with the seconds to wait before a retry.

    Raises:
        ConfigUnreadable: if the hub refuses the file, or fails three times.
    """
    if not _HUB_MODEL_NAME.fullmatch(model):
        raise ConfigUnreadable(
            "no hub model has such a name: for a model elsewhere, set pvc or hostPath in spec.modelSource"
        )
    url = f"{hub.rstrip('/')}/{model}/resolve/{quote(revision, safe='')}/config.json"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    reason = ""
    with httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as client:
        for wait_s in (*_RETRY_PAUSES_S, None):
            try:
                return _fetch(client, url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = f"{url}: {_describe_error(error)}"
            if wait_s is not None:
                pause(wait_s)
    raise ConfigUnreadable(reason)


def _fetch(client: httpx.Client, url: str) -> bytes:
    """Download the file.

    Raises:
        HTTPStatusError: for a status that may be temporary.
        ConfigUnreadable: for a permanent error.
    """
    with client.stream("GET", url) as response:
        if (reason := _describe_refusal(response, "authorization" in client.headers)) is not None:
            raise ConfigUnreadable(f"{url}: {reason} (status {response.status_code})")
        response.raise_for_status()
        body = b""
        for chunk in response.iter_bytes():
            body = _check_length(body + chunk, url)
        return body


def _describe_refusal(response: httpx.Response, with_token: bool) -> str | None:
    """The reason of a permanent error; None for any other status."""
    if response.status_code == httpx.codes.NOT_FOUND:
        code = response.headers.get("x-error-code", "")
        return _NOT_FOUND_ERRORS.get(code, "no such model, revision or file")
    if response.status_code in _TOKEN_ERRORS and not with_token:
        return _TOKEN_REQUIRED  # Hugging Face responds with 401 also for a model that does not exist
    return _TOKEN_ERRORS.get(response.status_code)


def _describe_error(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"the hub responded with an error (status {error.response.status_code})"
    return str(error) or type(error).__name__


def _check_length(body: bytes, where: str) -> bytes:
    if len(body) > _CONFIG_BYTES_MAX:
        raise ConfigUnreadable(f"{where}: is larger than 4 MiB: it cannot be a config.json")
    return body


def excerpt_report(body: bytes) -> str:
    """The excerpt of a config.json as compact JSON.

    Raises:
        ConfigUnreadable: if the file is not a valid config.json, or its excerpt exceeds `REPORT_BYTES_MAX`.
    """
    try:
        config = json.loads(body)
    except ValueError as error:
        raise ConfigUnreadable("config.json is not JSON") from error
    if not isinstance(config, dict):
        raise ConfigUnreadable("config.json is not a JSON object")
    try:
        text = json.dumps(excerpt_config(config), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ConfigUnreadable("config.json contains NaN or Infinity") from error
    if len(text) > REPORT_BYTES_MAX:
        raise ConfigUnreadable(
            f"the excerpt of config.json has {len(text)} bytes, the limit is {REPORT_BYTES_MAX}"
        )
    return text


if __name__ == "__main__":
    main()
