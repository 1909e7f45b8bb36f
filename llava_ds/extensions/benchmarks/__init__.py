"""Questions from benchmarks' files, answers that are kept as they come, and the official scores of them."""
