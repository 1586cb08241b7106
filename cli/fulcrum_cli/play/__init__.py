"""`fulcrum play`: a service on this machine under load, with a live view of its roles and a report."""
