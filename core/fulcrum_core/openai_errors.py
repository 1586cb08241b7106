"""The error object of the OpenAI API, as the router and the engine server send it; without serialisation."""

from typing import Any


def build_error_object(
    message: str, *, error_type: str, status: int, param: str | None = None
) -> dict[str, Any]:
    """`{"error": {...}}`: the JSON body of an error response, or the data of an error event."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": status}}
