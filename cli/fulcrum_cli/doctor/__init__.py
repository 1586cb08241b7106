"""`fulcrum doctor`: pure checks from observed facts to findings, and a thin shell that gathers the facts."""
