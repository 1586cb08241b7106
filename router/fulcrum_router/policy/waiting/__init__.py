"""Which requests wait in the router, and in which order they leave."""
