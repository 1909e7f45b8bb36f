"""Check a machine and its software before training."""
