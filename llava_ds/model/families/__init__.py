"""Families of models: all that differs from one to another."""
