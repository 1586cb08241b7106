"""The router of a simulation: the shipped journey, carried out over engine models.

Callbacks only: no asyncio, no sockets and no clock of its own, so that a discrete-event simulation and a test
on virtual time use the same lines.
"""

from fulcrum_simulator.routing.journeys import (
    Outcome,
    RoutingPort,
    SimulatedJourneys,
    SimulatedLeg,
    SimulatedRequest,
)
from fulcrum_simulator.routing.routed_requests import RouteDispatch, RoutedRequests

__all__ = [
    "Outcome",
    "RouteDispatch",
    "RoutedRequests",
    "RoutingPort",
    "SimulatedJourneys",
    "SimulatedLeg",
    "SimulatedRequest",
]
