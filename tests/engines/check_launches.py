"""Checks engine launches with the parsers and classes of vLLM and LMCache.

`test_launches_accepted` runs this program with the Python of the engine environment. The program starts
no engine and reads no model.

Standard input: JSON object {name: {"argv": [...], "env": [names]}}. Standard output: {name: [problems]}.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from lmcache.integration.vllm.mp_server_launcher import MPServerAutostartConfig
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.config_base import validate_and_set_config_value
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.multiprocess import http_server
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.envs import environment_variables
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

# Keys that each connector reads from its extra configuration. NixlConnector silently ignores others.
NIXL_KEYS = {"backends", "num_threads", "kv_lease_duration", "enforce_handshake_compat", "engine_ttl"}
MP_KEYS = {"lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.autostart", "lmcache.mp.autostart.server_args"}


def check_launch(argv: list[str], env: list[str]) -> Iterator[str]:
    """Yield the problems of one launch, as text; `argv` must contain --kv-transfer-config.

    Of the variables, only those of vLLM (VLLM_*) are checked.
    """
    yield from (
        f"vLLM reads no variable {name}"
        for name in env
        if name.startswith("VLLM_") and name not in environment_variables
    )
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args, unknown = parser.parse_known_args(argv)
            validate_parsed_serve_args(args)
    except (SystemExit, argparse.ArgumentError, ValueError) as error:
        yield f"vLLM refuses the command line: {errors.getvalue() or error}"
        return
    yield from (f"vLLM knows no argument {argument}" for argument in unknown)
    if args.attention_backend is not None and args.attention_backend not in AttentionBackendEnum.__members__:
        yield f"vLLM knows no attention backend {args.attention_backend}"
    config = args.kv_transfer_config
    yield from _check_connector(config if isinstance(config, dict) else vars(config))


def _check_connector(config: dict[str, Any]) -> Iterator[str]:
    given = {key: value for key, value in config.items() if key in KVTransferConfig.__dataclass_fields__}
    checked = KVTransferConfig(**given)
    extra = checked.kv_connector_extra_config
    name = str(checked.kv_connector)
    try:
        KVConnectorFactory.get_connector_class(checked)
    except Exception as error:
        yield f"{name}: {error}"
    if name == "NixlConnector":
        yield from (f"NixlConnector reads no key {key}" for key in sorted(set(extra) - NIXL_KEYS))
    elif name == "MultiConnector":
        for child in extra["connectors"]:
            yield from _check_connector(child)
    elif name == "LMCacheMPConnector":
        yield from _check_lmcache_server(extra)
    else:
        yield from _check_lmcache_config(extra)


def _check_lmcache_config(extra: dict[str, Any]) -> Iterator[str]:
    config = LMCacheEngineConfig.from_defaults()
    for key, value in extra.items():
        plain = key.removeprefix("lmcache.")
        if plain == key or not validate_and_set_config_value(config, plain, value):
            yield f"LMCache does not accept {value!r} for the key {key}"
    try:
        config.validate()
    except (AssertionError, ValueError) as error:
        yield f"LMCache refuses its configuration: {error!r}"


def _check_lmcache_server(extra: dict[str, Any]) -> Iterator[str]:
    yield from (f"LMCacheMPConnector reads no key {key}" for key in sorted(set(extra) - MP_KEYS))
    launched = MPServerAutostartConfig.from_extra_config(
        extra_config=extra, server_host="127.0.0.1", server_port=extra["lmcache.mp.port"]
    )
    command = launched.command()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            sys.argv = command[2:]
            parse_args_to_config(http_server.parse_args())
    except (SystemExit, ValueError) as error:
        yield f"LMCache's server refuses its command line: {errors.getvalue() or error}"


def main() -> None:
    """Check the launches on standard input. What vLLM and LMCache print goes to standard error."""
    output, sys.stdout = sys.stdout, sys.stderr
    launches = json.load(sys.stdin)
    problems = {name: list(check_launch(launch["argv"], launch["env"])) for name, launch in launches.items()}
    output.write(json.dumps(problems))
    output.flush()
    os._exit(0)  # vLLM and LMCache leave threads running


if __name__ == "__main__":
    main()
