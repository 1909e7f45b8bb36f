"""Resolve the DeepSpeed JSON: fill every "auto" from the flags, and report all conflicts together."""
