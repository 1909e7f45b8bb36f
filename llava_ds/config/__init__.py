"""The flags of a run: their fields, bounds, parsing and checks."""
