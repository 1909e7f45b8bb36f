"""Export of models as folders for transformers or LLaVA, as adapters, and as projector files."""
