"""Checks of a machine and its software before training."""
