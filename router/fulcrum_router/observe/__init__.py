"""What the router watches: the objects in the store, the service's pods, the engines' own metrics."""
