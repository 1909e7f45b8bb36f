"""What run/bench.py measures, and against what."""
