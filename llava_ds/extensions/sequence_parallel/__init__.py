"""Sequence parallelism (Ulysses): ranks share the tokens of every micro-batch, and each computes some heads."""
