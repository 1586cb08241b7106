"""vLLM: its command line, environment and volumes for one instance, or why it cannot run as asked. Pure."""

from fulcrum_operator.engines.vllm.launch import (
    IMAGE,
    POD,
    VERSION,
    known_of,
    launch_engine,
    model_folder,
    model_volume,
    plan_engine,
)

__all__ = [
    "IMAGE",
    "POD",
    "VERSION",
    "known_of",
    "launch_engine",
    "model_folder",
    "model_volume",
    "plan_engine",
]
