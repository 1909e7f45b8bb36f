"""Opening exported models, and generating answers."""
