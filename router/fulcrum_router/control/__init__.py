"""Interfaces to the control plane: state port, authentication of its callers, failover, metrics."""
