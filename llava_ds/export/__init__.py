"""Model folders for transformers and for LLaVA, adapters, and projectors."""
