"""Distillation: the student learns a teacher's distribution of every token."""
