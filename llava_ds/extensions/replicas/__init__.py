"""Regularly check that all ranks have equal copies of the weights."""
