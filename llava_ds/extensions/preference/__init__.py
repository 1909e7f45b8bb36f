"""Preferences between answers to a prompt: direct preference optimisation, KTO, and reward models."""
