"""Answers in several turns, with replies from an environment (a Python class of the user) between them."""
