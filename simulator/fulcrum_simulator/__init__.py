"""The simulator: an engine model, an engine server with vLLM's HTTP API, workloads, a load generator.

Also simulated fleets (`fleet`), bounds, and the measurement of engine profiles. `fulcrum`, tests and `bench`
use it; no program of a real service does.
"""
