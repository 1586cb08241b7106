"""`fulcrum regret`: the recorded requests of a service, replayed with other policies and instance counts."""
