"""Data sources are told apart, by as little as it takes."""

from llava_ds.data.source_names import short_names


def test_data_sources_have_short_names_that_differ():
    assert short_names(["/data/llava.json", "/data/vqa.jsonl"]) == ["llava", "vqa"]
    assert short_names(["/data/a/x.json", "/data/b/x.json"]) == ["a/x.json", "b/x.json"]
    assert short_names(["/data/x.json"] * 2) == ["/data/x.json (1)", "/data/x.json (2)"]
    assert short_names(["coco/train.json", "sqa/train.json"]) == ["coco/train.json", "sqa/train.json"]
    assert short_names(["x.json", "x.json", "y.json"]) == ["x.json (1)", "x.json (2)", "y.json"]
