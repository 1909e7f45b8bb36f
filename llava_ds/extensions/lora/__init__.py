"""LoRA and its variants: train low-rank matrices instead of the layers; the layers' weights may be packed (QLoRA)."""
