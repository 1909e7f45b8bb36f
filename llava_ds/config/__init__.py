"""The flags of a run: fields, bounds, parsing and checks."""
