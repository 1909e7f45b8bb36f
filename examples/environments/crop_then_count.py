"""An environment for counting in small images: the model may ask for a crop of a quarter, and then counts.

    python examples/environments/crop_then_count.py output/walls

writes walls: four generated scenes in one image, and questions about one of them. start.json has conversations to tune
on first: half of them ask for a quarter, drawn from those with such things, and the others answer at once. train.json
and heldout.json have questions for --environment examples/environments/crop_then_count.py:CropThenCount.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

QUARTERS = ("top left", "top right", "bottom left", "bottom right")
SIDE = 96  # pixels of a quarter


class CropThenCount:
    """One crop at most; the reward is 1 for the right number."""

    def reset(self, record, seed):
        self.record, self.may_ask = record, True

    def step(self, answer):
        if answer in QUARTERS and self.may_ask:
            self.may_ask = False
            return {"text": without_place(self.record["prompt"]), "images": [self.shown(answer)]}, 0.0, False
        return None, float(answer == self.record["reference"]), True

    def shown(self, quarter):
        return crop(self.record["images"][0], quarter)


class NoCrop(CropThenCount):
    """The same, but the whole image is shown again: for comparison."""

    def shown(self, quarter):
        return self.record["images"][0]


def crop(wall, quarter):
    """Return a quarter of an image."""
    width, height = wall.width // 2, wall.height // 2
    left, top = (QUARTERS.index(quarter) % 2) * width, (QUARTERS.index(quarter) // 2) * height
    return wall.crop((left, top, left + width, top + height))


def without_place(question):
    """Return a question about a wall as it is asked about one quarter."""
    return question.rpartition(" at the ")[0].strip() + "?"


def write_walls(folder, name, number, seed, heldout=False, demonstrations=False):
    """Write records with images of four scenes each."""
    from llava_ds.tiny.scene_splits import question_records
    from llava_ds.tiny.scenes import draw_scene

    rng, records = np.random.default_rng([seed, len(name)]), []
    (folder / name).mkdir(parents=True, exist_ok=True)
    asked = question_records(rng, ["count"] * number, heldout)
    drawn = [draw_scene(scene).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for _, scene in asked]
    others = rng.integers(0, number, (number, 3))
    for i, (record, _) in enumerate(asked):
        place = int(rng.integers(4))
        four = [int(j) for j in others[i]]
        four.insert(place, i)
        wall = Image.new("RGB", (2 * SIDE, 2 * SIDE))
        for at, j in enumerate(four):
            wall.paste(drawn[j], (at % 2 * SIDE, at // 2 * SIDE))
        path = f"{name}/{i:05d}.png"
        wall.save(folder / path)
        question, answer = (turn["value"] for turn in record["conversations"])
        talk, images = [question.rstrip("?") + f" at the {QUARTERS[place]}?", answer], [path]
        if demonstrations and i % 2:
            name_of_things = question.partition("How many ")[2].split(" are ")[0].split(" can ")[0]
            counts = [counted(asked[j][1], name_of_things) for j in four]
            shown = int(rng.choice([at for at in range(4) if counts[at]]))
            images.append(f"{name}/{i:05d}-crop.png")
            crop(wall, QUARTERS[shown]).save(folder / images[1])
            again = question.removeprefix("<image>\n")
            talk[1:] = [QUARTERS[shown], f"<image>\n{again}", counts[shown]]
        turns = [{"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(talk)]
        records.append({"id": f"{name}-{i:05d}", "image": images if len(images) > 1 else path, "conversations": turns})
    (folder / f"{name}.json").write_text(json.dumps(records, indent=1))


def counted(scene, name):
    """Return the number of things with a name like "red shapes" or "circles" as a word, None for none."""
    from llava_ds.tiny.questions import all_questions

    found = [question.answer for question in all_questions(scene, "count") if question.form[1] == name]
    return found[0] if found else None


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_walls(folder, "start", 4_000, 1, demonstrations=True)
    write_walls(folder, "train", 6_000, 2)
    write_walls(folder, "heldout", 500, 3, heldout=True)
