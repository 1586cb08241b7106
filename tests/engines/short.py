"""A service whose engines a person has configured by hand: a short lease, smaller blocks, little memory."""

import json

LEASE_S = 2
BLOCK = 64
LONGEST = 2048
KV_BYTES = 8 * 2**20
"""8,192 tokens: what has run out is soon overwritten."""
TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": LEASE_S},
}
ARGS = (
    *("--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", str(LONGEST)),
    *("--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(TRANSFER)),
)
SHORT = {
    "engine": {"type": "vLLM", "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}], "args": list(ARGS)}
}
