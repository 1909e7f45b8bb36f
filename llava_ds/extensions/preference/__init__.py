"""Preferences between two answers to a prompt: direct preference optimisation, and reward models."""
