"""Interfaces to the control plane: state port, authentication of its callers, failover, metrics.

Also the background tasks, and the paths that the router answers itself. `server` starts them; no request of a
client goes through here.
"""
