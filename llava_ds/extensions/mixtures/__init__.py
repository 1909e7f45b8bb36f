"""Mixtures of experts: language models with experts, and upcycling of dense models' MLPs to experts."""
