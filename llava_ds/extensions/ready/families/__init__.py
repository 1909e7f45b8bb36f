"""Families of ready models, a file each."""
