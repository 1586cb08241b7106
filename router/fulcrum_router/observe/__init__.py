"""Observe the outside and update the fleet: objects of the store, pods of the service, engines' metrics."""
