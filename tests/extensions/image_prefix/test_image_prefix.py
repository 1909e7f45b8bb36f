"""Records about one image: found, laid into one pack, and counted as they are computed."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import toys
from PIL import Image
from transformers import AutoTokenizer

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.data.collate import collate, counts_of
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing
from llava_ds.extensions.image_prefix.extension import fits
from llava_ds.extensions.image_prefix.grouped_dataset import GroupedDataset
from llava_ds.model.families.language import STATEFUL

IMAGES, PER_IMAGE = 5, 4


def write_questions(folder: Path) -> dict[str, str]:
    """Several conversations about each image, in turn, and every ninth record without an image."""
    rng = np.random.default_rng(7)
    (folder / "images").mkdir(parents=True)
    for i in range(IMAGES):
        pixels = rng.integers(0, 256, (*rng.integers(20, 50, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
    records = []
    for i in range(IMAGES * PER_IMAGE):
        turns = []
        for k in range(int(rng.integers(1, 4))):
            question = f"What is number {int(rng.integers(100))}?"
            turns.append({"from": "human", "value": question if k or i % 9 == 8 else f"<image>\n{question}"})
            turns.append({"from": "gpt", "value": toys.ANSWERS[int(rng.integers(4))]})
        record = {"id": f"q{i}", "conversations": turns}
        records.append(record if i % 9 == 8 else {**record, "image": f"{i % IMAGES}.png"})
    (folder / "data.json").write_text(json.dumps(records))
    return {"data_path": str(folder / "data.json"), "image_folder": str(folder / "images")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    given = {**toys.write_base(folder / "base"), **write_questions(folder)}
    tokenizer = AutoTokenizer.from_pretrained(given["model_name_or_path"])
    data = {name: given[name] for name in ("data_path", "image_folder")}
    return toys.encoded(**data, tokenizer=tokenizer, cache_dir=folder / "cache")


def shown(dataset, sample: int) -> str:
    return str(dataset.images_of(sample))


def test_samples_of_an_image_are_computed_together(plain):
    grouped = GroupedDataset(plain, by_image=False)
    packing, samples = Packing(2, 5, 2, 400), list(range(len(plain)))
    layout = packing.lay_out(samples, grouped)
    assert sorted(i for rank in layout for micro in rank for i in micro) == samples
    shared = 0
    for micro in (micro for rank in layout for micro in rank):
        items = grouped.__getitems__(micro)
        alone = [plain[i] for i in micro]
        for item, one in zip(items, alone):
            assert item.input_ids.equal(one.input_ids) and item.labels.equal(one.labels)
            assert all(a.equal(b) for (a, _), (b, _) in zip(item.media, one.media, strict=True))
        images = [shown(plain, i) for i in micro]
        repeats = [i > 0 and images[i] == images[i - 1] != "[]" for i in range(len(micro))]
        assert [item.shared > 0 for item in items] == repeats
        shared += sum(repeats)
        counts, batch = [counts_of(item) for item in items], collate(items, plain.image_options)
        tokens = sum(each.tokens for each in counts)
        assert tokens == batch.input_ids.shape[1] <= grouped.summed(grouped.lengths, micro) <= 400
        assert sum(each.tiles for each in counts) == len({*images} - {"[]"})
    assert shared > IMAGES


def test_images_are_drawn_instead_of_samples(plain):
    grouped = GroupedDataset(plain, by_image=True)
    order = SampleOrder(len(plain), 8, 3, grouped.drawn[0], grouped.lengths_for("images"))
    epochs = [order.epoch(epoch).tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch) == list(range(len(plain)))
        images = [shown(plain, i) for i in epoch if shown(plain, i) != "[]"]
        assert sum(a != b for a, b in itertools.pairwise(images)) == IMAGES - 1


def test_a_group_larger_than_a_pack_is_split(plain):
    grouped = GroupedDataset(plain, by_image=False)
    longest = int(plain.lengths.max())
    for most in (longest, 150):
        layout = Packing(1, len(plain), 1, most).lay_out(list(range(len(plain))), grouped)
        assert all(grouped.summed(grouped.lengths, micro) <= most or len(micro) == 1 for micro in layout[0])


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"share_image_prefix": True, "tokens_per_micro_batch": None}, "also give --tokens_per_micro_batch"),
        ({"group_by_image": True}, "belongs to --share_image_prefix True"),
        (
            {"share_image_prefix": True, "group_by_image": True, "shuffle": False},
            "--shuffle False set different orders",
        ),
        (
            {"share_image_prefix": True, "group_by_image": True, "group_by_length": True},
            "--group_by_length set different orders",
        ),
        ({"share_image_prefix": True, "objective": "dpo"}, "goes with --objective sft"),
        ({"share_image_prefix": True, "stream": True}, "needs all samples before the first step"),
    ],
)
def test_refusals(flags, message, tmp_path):
    given = {"tokens_per_micro_batch": 512, "deepspeed_config": "zero2", "output_dir": tmp_path, "learning_rate": 1e-3}
    words = [w for name, value in {**given, **flags}.items() if value is not None for w in (f"--{name}", str(value))]
    with pytest.raises(ConfigError, match=message):
        parse_arguments(words)


def test_layers_with_a_state_do_not_share():
    config = toys.language_model_config("llama")
    args = SimpleNamespace(broken=())
    assert not list(fits(args, config))
    config.layer_types = [STATEFUL, "full_attention"]
    assert "layers with a state: leave it out" in next(fits(args, config))
