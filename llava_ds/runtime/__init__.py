"""Ranks, launchers, processes, signals, output and the watchdog: everything that runs around training."""
