"""The autoscaler: who shall play which role, decided from the router's live state."""
