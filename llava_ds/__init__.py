"""A LLaVA-style image-text model trainer written directly on the DeepSpeed engine."""

__version__ = "0.1.0"
