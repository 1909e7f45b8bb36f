"""Model folders: their configuration, their weights, and the names of their tensors."""
