"""Logs, curves, trackers and HTML pages of a run."""
