"""The router: sends each request's prefill and decode to the right instances and relays the answer.

`policy/` decides and is pure; the rest is the data path on asyncio protocols, its accounting, and the
watches that tell it who plays which role.
"""
