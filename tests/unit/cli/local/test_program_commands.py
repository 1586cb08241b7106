"""The command lines of a local run are the ones that its programs parse."""

import sys
from pathlib import Path

from fulcrum_cli.local.engines import simulated_engine_command
from fulcrum_cli.local.program_commands import SharedOptions, autoscaler_command, router_command
from fulcrum_core.api import EngineIdentitySpec
from fulcrum_core.profiles import load_profile
from fulcrum_operator.engines import simulated
from fulcrum_simulator.server.options import parse_options
from tests.unit.operator.builders import instance

SHARED_OPTIONS = SharedOptions(
    service="chat",
    namespace="default",
    host="127.0.0.1",
    store_address="unix:/r/store.sock",
    token_file=Path("/r/token"),
)
SHARED_ARGUMENTS = (
    "--service chat --namespace default --host 127.0.0.1 --store unix:/r/store.sock --token-file /r/token"
)


def test_the_engine_server_parses_the_command_line_made_for_it() -> None:
    command = simulated_engine_command(instance("chat-3"), host="127.0.0.1")
    options = parse_options(command[3:])
    assert (command[:3], options.name, options.model, options.profile, options.host, options.port) == (
        (sys.executable, "-m", simulated.SERVER_MODULE),
        "chat-3",
        "m",
        load_profile("laptop"),
        "127.0.0.1",
        0,
    )


def test_a_simulated_engines_identity_follows_from_model_and_profile() -> None:
    assert simulated.identity(instance("chat-3").spec, load_profile("laptop")) == EngineIdentitySpec(
        model="m", engine="simulated", kv_dtype="auto", block_size=16, tensor_parallel=1
    )


def test_the_router_gets_its_ports_and_the_shared_options() -> None:
    ports = {"port": 8000, "state_port": 0, "metrics_port": 0}
    assert (
        " ".join(router_command(SHARED_OPTIONS, ports)[1:])
        == f"-m fulcrum_router {SHARED_ARGUMENTS} --port 8000 --state-port 0 --metrics-port 0"
    )


def test_the_autoscaler_gets_its_port_and_the_routers_state_url() -> None:
    command = " ".join(autoscaler_command(SHARED_OPTIONS, 0, "http://127.0.0.1:1")[1:])
    assert command == f"-m fulcrum_autoscaler {SHARED_ARGUMENTS} --port 0 --router-state http://127.0.0.1:1"
