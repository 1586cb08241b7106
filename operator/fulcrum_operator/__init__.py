"""The operator: makes what a PDService asks for, and drives every instance through its phases."""
