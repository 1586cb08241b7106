"""The autoscaler: decides from the router's live state which instance serves prefill and which decode.

`policy/` decides and is pure; the other modules observe, write the flip, and serve decisions and metrics. The
number of instances is not decided here.
"""
