"""Observe the outside and update the fleet: objects of the store, pods of the service, engines' metrics.

`server` runs these watches and probes. No request of a client passes here.
"""
