"""Vision tower, projector, language model, and how they are built and loaded."""
