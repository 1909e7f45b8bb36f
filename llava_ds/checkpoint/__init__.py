"""Checkpoints: saving, verifying and resuming."""
