"""Command lines: what is written is what the programs read."""

from pathlib import Path

from fulcrum_cli.local.commands import Surroundings, autoscaler_command, router_command
from fulcrum_core.api import IdentitySpec
from fulcrum_core.profiles import load_profile
from fulcrum_operator.engines import simulated
from fulcrum_simulator.server.options import parse_options
from tests.unit.operator.builders import instance

AROUND = Surroundings(
    service="chat",
    namespace="default",
    host="127.0.0.1",
    store="unix:/r/store.sock",
    token_file=Path("/r/token"),
)
TOLD = "--service chat --namespace default --host 127.0.0.1 --store unix:/r/store.sock --token-file /r/token"


def test_an_engine_server_reads_its_command_line() -> None:
    words = simulated.command(instance("chat-3"), python="python", host="127.0.0.1")
    options = parse_options(words[3:])
    assert (words[:3], options.name, options.model, options.profile, options.host, options.port) == (
        ("python", "-m", "fulcrum_simulator.server"),
        "chat-3",
        "m",
        load_profile("laptop"),
        "127.0.0.1",
        0,
    )


def test_what_an_engine_is_to_its_peers_follows_from_model_and_profile() -> None:
    assert simulated.identity(instance("chat-3").spec, load_profile("laptop")) == IdentitySpec(
        model="m", engine="simulated", kv_dtype="auto", block_size=16, tensor_parallel=1
    )


def test_the_routers_command_line() -> None:
    assert (
        " ".join(router_command(AROUND, 8000, 0)[1:])
        == f"-m fulcrum_router {TOLD} --port 8000 --state-port 0"
    )


def test_the_autoscalers_command_line() -> None:
    words = " ".join(autoscaler_command(AROUND, 0, "http://127.0.0.1:1")[1:])
    assert words == f"-m fulcrum_autoscaler {TOLD} --port 0 --router-state http://127.0.0.1:1"
