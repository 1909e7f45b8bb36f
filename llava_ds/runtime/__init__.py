"""Ranks, launchers, processes, signals, output and the watchdog: what runs around training."""
