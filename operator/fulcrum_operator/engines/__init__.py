"""What each engine type needs to know: its command line, its identity, how it flips. Pure."""
