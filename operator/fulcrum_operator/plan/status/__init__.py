"""What the status of a PDService says: one module per condition. Pure."""
