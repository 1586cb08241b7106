"""Failed legs: who caused them, which may be retried, and which instances are ejected for them.

Pure. The journey and the router ask; `fleet.health` keeps what happened to each instance.
"""
