"""Preferences: of two answers to a prompt the better one. Direct preference optimisation, and reward models."""
