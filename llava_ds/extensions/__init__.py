"""Features that a run may do without: a folder for each, which the rest of the package never imports by name."""
