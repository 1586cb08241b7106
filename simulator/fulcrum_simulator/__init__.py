"""The simulator: an engine model, an engine server with vLLM's HTTP API, workloads and a load generator,
without GPUs.
"""
