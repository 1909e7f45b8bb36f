"""Data of run/dev/compare_trl.py: pairs of answers and questions about generated scenes, as both sides read them."""

import json
from pathlib import Path

import numpy as np

from llava_ds.data.templates import TEMPLATES
from llava_ds.tiny.questions import ANSWERS, KINDS, TURN_SHARES, caption
from llava_ds.tiny.scene_splits import question_records
from llava_ds.tiny.scenes import draw_scene, sample_scene

SEED = 22
CAPTION_EVERY = 4  # pairs: one of so many asks for a description


def drawn_questions(number: int) -> list[tuple[dict, object]]:
    """(record, scene) of questions in the shares that conversations have them in."""
    rng = np.random.default_rng(SEED)
    return question_records(rng, rng.choice(KINDS, number, p=TURN_SHARES).tolist(), heldout=False)


def write_questions(folder: Path, number: int, caption_every: int) -> dict[str, dict]:
    """Write data.json and its images. caption_every: one of so many asks for a description. Returns records by id."""
    rng, records = np.random.default_rng(SEED), []
    for i, (record, scene) in enumerate(drawn_questions(number)):
        turns = record["conversations"]
        if i % caption_every == 0:
            turns = [
                {"from": "human", "value": "<image>\nDescribe the picture."},
                {"from": "gpt", "value": caption(scene, rng)},
            ]
        records.append({"id": f"q{i}", "conversations": turns, "image": save(scene, folder, i)})
    write(folder, records)
    return {record["id"]: record for record in records}


def write_pairs(folder: Path, number: int, has_images: bool) -> None:
    """Write data.json for run/train.py, with images or with the scenes in words, and trl.json for TRL.

    The chosen answers are right, the rejected ones are wrong; some are descriptions.
    """
    rng, ours, theirs = np.random.default_rng(SEED), [], []
    for i, (record, scene) in enumerate(drawn_questions(number)):
        question, right = (turn["value"] for turn in record["conversations"])
        question = question.removeprefix("<image>\n")
        wrong = str(rng.choice([answer for answer in ANSWERS[record["kind"]] if answer != right]))
        if i % CAPTION_EVERY == 0:
            question, right, wrong = "Describe the picture.", caption(scene, rng), caption(sample_scene(rng), rng)
        if not has_images:
            question = f"This is what a picture shows: {caption(scene, rng)}\n{question}"
        mark = "<image>\n" if has_images else ""
        row = {"id": f"p{i}", "conversations": [{"from": "human", "value": mark + question}]}
        image = {"image": save(scene, folder, i)} if has_images else {}
        ours.append({**row, **image, "chosen": right, "rejected": wrong})
        theirs.append(trl_row(folder, question, right, wrong, **image))
    write(folder, ours)
    (folder / "trl.json").write_text(json.dumps(theirs))


def trl_row(folder: Path, question: str, right: str, wrong: str, image: str | None = None) -> dict[str, object]:
    """A pair as TRL reads it: messages, or with an image texts.

    TRL tokenizes prompt and answers of rows with images apart, and adds no begin mark to them: given as messages they
    would be other ids than in training and in chat.
    """
    if image is None:
        pair = {"chosen": right, "rejected": wrong}
        answers = {name: [{"role": "assistant", "content": text}] for name, text in pair.items()}
        return {"prompt": [{"role": "user", "content": question}], **answers}
    prompt = f"<s>{TEMPLATES['v1'].system} USER: <image>\n{question} ASSISTANT:"
    path = str((folder / image).resolve())
    return {"images": [path], "prompt": prompt, "chosen": f"{right}</s>", "rejected": f"{wrong}</s>"}


def save(scene, folder: Path, number: int) -> str:
    """Write a scene's picture, and return its path in the folder."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    name = f"images/{number}.png"
    draw_scene(scene).save(folder / name)
    return name


def write(folder: Path, records: list[dict]) -> None:
    """Write data.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps(records))


def rollouts_for_trl(steps: list[list[dict]], records: dict[str, dict], folder: Path, image_id: int) -> list:
    """Recorded rollouts with question and image of their prompts, and TRL's id at the positions of features."""
    found = []
    for groups in steps:
        found.append([])
        for group in groups:
            record = records[group["id"]]
            question = record["conversations"][0]["value"].removeprefix("<image>\n")
            ids = [image_id if one < 0 else one for one in group["prompt_ids"]]
            path = str((folder / record["image"]).resolve()) if "image" in record else None
            found[-1].append({**group, "prompt_ids": ids, "question": question, "image": path})
    return found
