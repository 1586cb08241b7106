"""The command line: play, up, plan, status, flip, drain, explain, doctor, and simulations.

`__main__` declares the commands. Those that act on a service find it by `target`, in a local run or a
cluster, and change nothing but the service's Fulcrum objects.
"""
