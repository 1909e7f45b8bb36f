"""Read benchmark questions, store answers as they arrive, and compute the official scores."""
