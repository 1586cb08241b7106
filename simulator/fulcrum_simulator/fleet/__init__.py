"""A simulated fleet on virtual time: engines, router and autoscaler of one service under a workload.

The engine model and the policies are those that run in production. `run.simulate` puts them on one event
queue, so that an hour takes seconds. No I/O, no clock.
"""
