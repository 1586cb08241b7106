"""One module per command; `play` and `doctor` have packages of their own."""
