"""Turn records on disk into batches of tensors."""
