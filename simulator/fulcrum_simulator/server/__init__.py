"""The engine server: vLLM's HTTP API over the engine model, in real time, one process per engine.

It behaves as a router, an operator and Prometheus expect of a real engine, failures included, so that the
same control plane runs without GPUs. The engine model computes step times and KV blocks; this package adds
the clock, the sockets and the metrics. A local run and simulated pods start `python -m
fulcrum_simulator.server`.
"""
