"""Liger's fused norms, rotary positions and SwiGLU in place of transformers', compared with them first."""
