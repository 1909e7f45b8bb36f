"""Mixtures of experts: train language models with experts, or upcycle the MLPs of dense models to experts."""
