"""The simulator: an engine model, an engine server with vLLM's HTTP API, workloads, a load generator."""
