"""Estimate memory and speed of a run before it starts, and choose a configuration that fits."""
