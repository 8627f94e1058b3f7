"""What several models share; no model itself, so that the command line does not list it."""
