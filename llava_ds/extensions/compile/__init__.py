"""torch.compile for the repeated layers of tower and language model."""
