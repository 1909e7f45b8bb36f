"""The encoded data set: encoded once, found again when nothing has changed that its ids depend on."""

import json
from dataclasses import replace

import pytest
import torch
import toys
from transformers import AutoTokenizer

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data import dataset as dataset_module
from llava_ds.data.dataset import EncodedDataset, PictureOptions, open_encoded
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.images import load_image, to_pixels
from llava_ds.data.sources import read_samples
from llava_ds.tiny.tokenizer import save_tokenizer, train_tokenizer

P = (toys.IMAGE_SIZE // toys.PATCH_SIZE) ** 2
ENCODING = EncodingOptions("v1", 512)
PICTURES = PictureOptions(toys.IMAGE_SIZE, (0.5, 0.4, 0.3), "square", 10**6, P)
KINDS = "titti"


@pytest.fixture
def opened(tmp_path, tokenizer):
    """open_encoded on toy data; keywords replace its arguments."""
    data = toys.write_data(tmp_path / "data", KINDS)

    def open_it(**changed) -> EncodedDataset:
        values = {"tokenizer": tokenizer, "encoding": ENCODING, "pictures": PICTURES, "cache_dir": str(tmp_path / "c")}
        return open_encoded(**{**data, **values, **changed})

    return open_it


def write(path, records) -> str:
    path.write_text(json.dumps(records))
    return str(path)


def talk(*texts: str) -> dict:
    return {"conversations": [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]}


def test_samples_are_the_records_encoded_and_their_pictures_prepared(opened, tmp_path, tokenizer):
    data = opened()
    samples = read_samples(tmp_path / "data" / "data.json", tmp_path / "data" / "images")
    assert len(data) == len(samples) == len(KINDS)
    for i, sample in enumerate(samples):
        [coded] = Encoder(tokenizer, ENCODING).encode_batch([(sample.messages, [P] * len(sample.images))])
        loaded = data[i]
        assert loaded.input_ids.dtype == loaded.labels.dtype == torch.int64
        assert loaded.input_ids.tolist() == coded.input_ids.tolist() and loaded.labels.tolist() == coded.labels.tolist()
        assert data.lengths[i] == len(coded.input_ids) and data.num_targets[i] == coded.num_targets
        assert int((loaded.input_ids == IMAGE_TOKEN_INDEX).sum()) == P * (KINDS[i] == "i")
        assert len(loaded.pixels) == len(sample.images)
        for pixels, path in zip(loaded.pixels, sample.images):
            expected = to_pixels(load_image(path, 10**6), PICTURES.size, "square", PICTURES.mean)
            assert torch.equal(pixels, expected)
    assert data.first_with_picture() == KINDS.index("i")


def test_a_second_opening_reads_the_cache(opened, monkeypatch):
    first = opened()

    def refuse(*_):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(dataset_module, "Encoder", refuse)
    again = opened()
    assert again.fingerprint == first.fingerprint
    assert (again.lengths, again.num_targets) == (first.lengths, first.num_targets)
    assert all(torch.equal(again[i].input_ids, first[i].input_ids) for i in range(len(first)))


def test_picture_options_change_pixels_and_not_the_fingerprint(opened, monkeypatch):
    first = opened()
    monkeypatch.setattr(dataset_module, "Encoder", None)
    padded = opened(pictures=replace(PICTURES, aspect_ratio="pad", max_pixels=10**7))
    assert padded.fingerprint == first.fingerprint
    i = first.first_with_picture()
    assert not torch.equal(padded[i].pixels[0], first[i].pixels[0])


def test_the_fingerprint_changes_with_all_that_ids_depend_on(opened, tmp_path):
    prints = [opened().fingerprint]
    prints.append(opened(encoding=replace(ENCODING, max_length=511)).fingerprint)
    prints.append(opened(pictures=replace(PICTURES, num_image_tokens=P + 1)).fingerprint)
    (tmp_path / "other").mkdir()
    save_tokenizer(train_tokenizer([*toys.TEXTS, "What is it, number? There is no dog."], 420), tmp_path / "other")
    prints.append(opened(tokenizer=AutoTokenizer.from_pretrained(tmp_path / "other")).fingerprint)
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    records[0]["conversations"][1]["value"] += "!"
    prints.append(opened(data_path=write(tmp_path / "changed.json", records)).fingerprint)
    assert len(set(prints)) == len(prints)


def test_the_fingerprint_changes_with_the_template(opened, tmp_path):
    data = toys.write_data(tmp_path / "captions", "iii", plain=True)
    one, other = (opened(**data, encoding=replace(ENCODING, template=name)).fingerprint for name in ("v1", "plain"))
    assert one != other


def test_records_with_nothing_to_learn_from_are_refused_with_their_number(opened, tmp_path):
    records = [talk("Who?", "yes"), talk("Who?", ""), talk("What is it? " * 30, "two")]
    records[2]["id"] = "long"
    with pytest.raises(DataError) as caught:
        opened(data_path=write(tmp_path / "bad.json", records), encoding=replace(ENCODING, max_length=150))
    message = str(caught.value)
    assert "2 of 3 records can't be trained on with --version v1 and --model_max_length 150" in message
    assert "record 1 (1): nothing to learn from, no answer has a text" in message
    assert "record 2 (long): nothing to learn from, the first 150 tokens hold no answer" in message
    assert "record 0" not in message
    assert not list((tmp_path / "c").rglob("*.arrow"))  # nothing half-made is found next time


def test_records_that_do_not_fit_the_template_are_refused_with_their_number(opened, tmp_path):
    with pytest.raises(DataError) as caught:
        opened(
            data_path=write(tmp_path / "bad.json", [talk("Who?", "yes")]),
            encoding=replace(ENCODING, template="plain"),
        )
    assert "record 0 (0): the plain template takes one question with one <image>" in str(caught.value)


def test_the_summary_counts_what_there_is(opened):
    data = opened()
    tokens = sum(len(data[i].input_ids) for i in range(len(data)))
    targets = sum(int((data[i].labels != IGNORE_INDEX).sum()) for i in range(len(data)))
    line = data.summary("toys")
    assert line.startswith(f"toys: 5 samples, 2 pictures, {tokens:,} tokens, of which {targets:,} (")
    assert line.endswith(f"longest sample {max(data.lengths):,}")
    limit = max(data.lengths) - 1
    cut = opened(encoding=replace(ENCODING, max_length=limit)).summary("toys")
    assert cut.endswith(f"; {sum(n > limit for n in data.lengths)} cut at --model_max_length")


def test_no_scratch_folder_is_left(opened, tmp_path):
    data = opened()
    assert [path.name for path in (tmp_path / "c" / "encoded").iterdir()] == [data.fingerprint]
