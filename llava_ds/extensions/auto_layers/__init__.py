"""Checkpoint as few layers as memory allows, measured before the first step (--gradient_checkpointing auto)."""
