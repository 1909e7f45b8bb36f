"""Convert a language model from a GGUF file to a folder for transformers, in fp32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the dequantized model and its tokenizer, including the chat template."""
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # a model with one can't be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
