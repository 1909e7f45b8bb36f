"""Use Liger's fused norms, rotary positions and SwiGLU, after comparing them with transformers' code."""
