"""Families of ready models, one file each."""
