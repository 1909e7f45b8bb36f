"""Objectives: supervised fine-tuning, and the interface that they share."""
