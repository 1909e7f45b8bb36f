"""LoRA and its variants: low-rank matrices train instead of the layers, whose weights may be packed (QLoRA)."""
