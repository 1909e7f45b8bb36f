"""Liger's fused norms, rotary positions and SwiGLU instead of transformers', after a comparison."""
