"""Which requests wait in the router, and in which order they leave.

Pure. Journeys join the `WaitingRoom` and are asked to leave it; where they go then is their choice.
"""
