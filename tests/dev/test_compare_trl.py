"""The comparison with TRL: its data, what it refuses, and how it counts seconds; TRL itself is not needed."""

import json

import pytest
from benchmark import trl_data, trl_equal

IMAGE_ID = 9


def test_batches_are_compared_row_by_row_also_where_trl_accumulates_single_pairs():
    chosen, rejected = [[1, -5, 2], [2]], [[1, -5, 4], [4]]
    others = [[3, 6], [6]], [[3, 7, 8], [7, 8]]
    ours = [[chosen, others[0], rejected, others[1]]]
    seen = [[[IMAGE_ID if i < 0 else i for i in ids], targets] for ids, targets in ours[0]]
    whole, alone = [seen], [[seen[0], seen[2]], [seen[1], seen[3]]]
    for theirs in (whole, alone):
        trl_equal.refuse_other_batches("sigmoid", ours, theirs, IMAGE_ID)
    wrong = [[[[1, IMAGE_ID, 3], [3]], *seen[1:]]]
    with pytest.raises(AssertionError, match="sigmoid, step 0, row 0"):
        trl_equal.refuse_other_batches("sigmoid", ours, wrong, IMAGE_ID)


def test_pairs_of_both_sides_are_the_same(tmp_path):
    trl_data.write_pairs(tmp_path / "a", 12, has_images=True)
    trl_data.write_pairs(tmp_path / "b", 12, has_images=False)
    for folder, has_images in ((tmp_path / "a", True), (tmp_path / "b", False)):
        ours, theirs = (json.loads((folder / name).read_text()) for name in ("data.json", "trl.json"))
        for own, other in zip(ours, theirs, strict=True):
            assert own["chosen"] != own["rejected"]
            question = own["conversations"][0]["value"]
            if has_images:
                assert f"USER: {question} ASSISTANT:" in other["prompt"]
                assert other["images"] == [str(folder / own["image"])] and (folder / own["image"]).is_file()
                assert (other["chosen"], other["rejected"]) == (f"{own['chosen']}</s>", f"{own['rejected']}</s>")
            else:
                assert other["prompt"][0]["content"] == question
                assert other["chosen"][0]["content"] == own["chosen"]


def test_rollouts_get_their_questions_and_transformers_ids(tmp_path):
    records = {"q0": {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "images/0.png"}}
    [[group]] = trl_data.rollouts_for_trl([[{"id": "q0", "prompt_ids": [1, -200, 5]}]], records, tmp_path, IMAGE_ID)
    assert group["prompt_ids"] == [1, IMAGE_ID, 5] and group["question"] == "What?"
    assert group["image"] == str(tmp_path / "images" / "0.png")
