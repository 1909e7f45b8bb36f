"""Experts are one tensor in memory, and one each on disk, as transformers has them."""

import json
from functools import partial

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llava_ds.constants import DataError
from llava_ds.export.tensors import Entry, Names
from llava_ds.extensions.mixtures.kinds import EXPERTS
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.model.open.folder import read_folder


def test_the_table_has_the_model_types():
    """Gemma 4 is found by its field enable_moe_block, because some of its sizes are dense."""
    assert set(EXTENSIONS["mixtures"].text_types.split()) == EXPERTS.keys() - {"gemma4_text"}


@pytest.mark.parametrize("family", toys.MIXTURES)
def test_experts_are_stacked_as_they_are_read_and_divided_as_they_are_written(family, tmp_path):
    """Against transformers' own way in and out; in several files, so that a layer's experts lie apart."""
    torch.manual_seed(0)
    toys.write_language_model(tmp_path, family)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert any((".experts.3." if EXPERTS[family].matrices else ".input_linear.") in name for name in on_disk)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = sorted(on_disk)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: on_disk[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    folder = read_folder(str(tmp_path))
    weights, expected = folder.language_model.open(), dict(model.named_parameters())
    found = {name: read() for name, read in weights.tensors()}
    assert found.keys() == expected.keys() == weights.shapes.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]) and tuple(tensor.shape) == weights.shapes[name], name
    reads = []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return expected[name].detach()

    entries = [Entry(f"language_model.{name}", tuple(p.shape), partial(read, name)) for name, p in expected.items()]
    written = {
        entry.name.removeprefix("language_model."): entry for entry in Names.of(folder.text_config).divided(entries)
    }
    assert written.keys() == on_disk.keys()
    assert all(torch.equal(entry.read(), on_disk[name]) for name, entry in written.items())
    assert reads == list(expected)  # each stack once


def test_an_expert_that_is_missing_is_named(tmp_path):
    toys.write_language_model(tmp_path, "mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        DataError, match=r"lacks w3 of expert 2 in model\.layers\.1\.mlp\.experts: copy the folder again"
    ):
        read_folder(str(tmp_path)).language_model.open()
