"""The router as seen by the control plane: state port, authentication, failover, metrics."""
