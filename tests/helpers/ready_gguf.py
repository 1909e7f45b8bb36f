"""Random tiny ready models in sizes that llama.cpp takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import ready_models
from safetensors.torch import load_file, save_file
from toys import TEXTS
from transformers import AutoTokenizer

FAMILIES = ("smolvlm", "idefics3", "qwen2_5_vl", "qwen2_vl")
QWEN_PATCH = 28  # then a window of 2 x 2 cells has llama.cpp's 112 pixels


@contextmanager
def sizes_of(family: str) -> Iterator[None]:
    """Write and open models of a family in these sizes."""
    patch = QWEN_PATCH if family.startswith("qwen") else ready_models.PATCH
    with mock.patch.object(ready_models, "PATCH", patch):
        yield


def write_ready(folder: Path, family: str, **text: object) -> Path:
    """Write a model with a token for two line breaks, which never draws an image's token."""
    with sizes_of(family), mock.patch.object(ready_models, "TEXTS", [*TEXTS, *["\n\n"] * 50]):
        ready_models.write_ready(folder, family, **text)
    tensors, vocab = load_file(folder / "model.safetensors"), AutoTokenizer.from_pretrained(folder).get_vocab()
    for token in {"<image>", "<|image_pad|>", "<|video_pad|>"} & vocab.keys():
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"][vocab[token]] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
