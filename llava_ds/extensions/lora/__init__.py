"""LoRA and its variants: matrices beside the layers train in place of the layers, which may be packed (QLoRA)."""
