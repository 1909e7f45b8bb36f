"""torch.compile over the repeated layers of tower and language model."""
