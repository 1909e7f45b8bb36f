"""The DeepSpeed JSON as a contract: every "auto" filled from the flags, every conflict reported together."""
