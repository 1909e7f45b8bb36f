"""Logs, curves, trackers and pages of a run."""
