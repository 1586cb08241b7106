"""The autoscaler: decides from the router's live state which instance serves prefill and which decode."""
