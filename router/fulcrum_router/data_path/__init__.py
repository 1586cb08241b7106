"""One request: read from the client, prefilled on one instance, decoded on another, relayed back."""
