"""What a finished model becomes: a folder for transformers, for LLaVA's own code, or a projector by itself."""
