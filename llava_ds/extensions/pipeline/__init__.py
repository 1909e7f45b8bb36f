"""Ranks that have a stage each: some consecutive layers, between which hidden states travel."""
