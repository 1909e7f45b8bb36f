"""Building the weights: a few steps, twice from one seed, give the same files."""

import pytest
import torch
from tiny_model.build_clip import ClipRecipe, build_clip
from tiny_model.build_llama import LlamaRecipe, build_llama

SMALL = {"num_steps": 3, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (build_clip, ClipRecipe(num_pictures=16, batch_size=8, num_eval_scenes=64, **SMALL)),
        (build_llama, LlamaRecipe(chats_per_batch=3, plains_per_batch=3, num_eval_per_kind=4, num_corpus=300, **SMALL)),
    ],
)
def test_a_few_steps_are_deterministic(build, recipe, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        accuracies = [build(tmp_path / str(i), 4, recipe) for i in range(2)]
    finally:
        torch.set_num_threads(threads)
    assert accuracies[0] == accuracies[1]
    files = sorted(p.name for p in (tmp_path / "0").iterdir())
    assert "model.safetensors" in files and "config.json" in files
    assert all((tmp_path / "0" / f).read_bytes() == (tmp_path / "1" / f).read_bytes() for f in files)
