"""Write a small model's weights in half precision, under the old names of the Hugging Face layout."""

import json

import torch
from safetensors.torch import save_file


def save_half(model, folder, rename=lambda key: key):
    """Write config.json and model.safetensors (float16); keys go through rename."""
    state = {rename(key): value.detach().to(torch.float16).contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files readable only by their owner
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
