"""What helps around a training run: how much memory it needs."""
