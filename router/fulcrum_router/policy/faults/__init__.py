"""Failed legs: who caused them, which may be retried, and which instances are ejected for them."""
