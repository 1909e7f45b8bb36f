"""The images of sample questions on a page."""

import io
import json
import tarfile
from pathlib import Path

import pytest
import toys

from llava_ds.extensions.samples.report import sampled_answers
from llava_ds.tracking.blocks import show


def in_tar(folder: Path) -> Path:
    """The same records as a WebDataset shard: each one's JSON and picture."""
    path = folder / "data.tar"
    with tarfile.open(path, "w") as tar:
        for record in json.loads((folder / "data.json").read_text()):
            picture = folder / "images" / record.pop("image")
            for suffix, content in (("png", picture.read_bytes()), ("json", json.dumps(record).encode())):
                member = tarfile.TarInfo(f"{record['id']}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def test_pictures_within_a_tar_are_shown(tmp_path, tokenizer):
    toys.write_data(tmp_path / "data", "ii")
    dataset = toys.encoded(str(in_tar(tmp_path / "data")), None, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    rows = [{"step": 1, "id": str(i), "question": "?", "images": dataset.images_of(i), "answer": ""} for i in range(2)]
    page = show(sampled_answers(json.loads(json.dumps(rows)), tmp_path / "run"))
    assert page.count("<img") == 2 and "can't be shown" not in page
    assert len({part.split('"')[0] for part in page.split('src="')[1:]}) == 2  # each its own


@pytest.mark.parametrize("place", [{"path": "a"}, {"offset": 1}, {"path": 1, "offset": 0}, 7])
def test_a_picture_that_is_nowhere_has_a_sentence(tmp_path, place):
    page = show(sampled_answers([{"step": 1, "id": "a", "images": [place], "answer": "x"}], tmp_path))
    assert "<img" not in page and "The image can" in page
