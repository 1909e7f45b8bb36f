"""Answers in several turns: an environment, a Python class of the user, speaks between them."""
