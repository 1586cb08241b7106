"""`fulcrum play`: a whole service on this machine, under load, with its roles moving before one's eyes."""
