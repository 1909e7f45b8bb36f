"""Objectives: their interface, and supervised fine-tuning."""
