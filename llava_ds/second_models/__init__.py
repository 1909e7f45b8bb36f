"""Models beside the one that trains."""
