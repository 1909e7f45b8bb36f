"""Mixtures of experts: language models that have them, and dense ones whose MLPs become them (upcycling)."""
