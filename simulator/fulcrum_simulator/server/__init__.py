"""The engine server: vLLM's HTTP surface over the pure engine model, in real time.

It speaks what a router, an operator and a Prometheus expect of a real engine, down to its failures, so
that the same control plane runs on a laptop. What a step costs and which blocks a request holds is the
engine model's business; what this package adds is the clock, the sockets and the exposition.
"""
