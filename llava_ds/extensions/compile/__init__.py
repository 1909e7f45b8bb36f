"""Apply torch.compile to the repeated layers of tower and language model."""
