"""Vision tower, projector and language model: building and loading them."""
