"""Read the tower of make real without the language model: a bound for what training can reach.
run/dev/probe_real.py FOLDER [QUESTIONS ...]

FOLDER is what run/dev/write_real.py wrote. Two probes answer the questions of choices.json (and others by name), from
the mean of the tower's normalized patches and its class token: ridge regression, from training images to the language
model's hidden state at the end of "This is a picture of a(n) ...", chooses the nearest of the four nouns; the nearest
mean uses a noun's other held-out images, for questions where all four nouns have one.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from real.onnx_tower import PROCESSOR
from transformers import AutoModelForCausalLM, AutoTokenizer, Dinov2Model

LAYER, STATE, RIDGE, BATCH = -2, 12, 1000.0, 32  # numbers: the tower's layer, the language model's layer


def main() -> None:
    """Print a line for each file of questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("questions", nargs="*", default=["choices", "photos-unseen", "photos-seen"])
    args = parser.parse_args()
    training = nouns_of(json.loads((args.folder / "train.json").read_text()))
    files = {name: json.loads((args.folder / f"{name}.json").read_text()) for name in args.questions}
    asked = {each["image"] for file in files.values() for each in file}
    images = sorted({*training, *asked})
    features = dict(zip(images, describe(args.folder, images)))
    nouns = sorted({*training.values(), *(noun for file in files.values() for each in file for noun in options(each))})
    states = dict(zip(nouns, read(args.folder, nouns)))
    fitted = fit(torch.stack([features[each] for each in training]), [states[noun] for noun in training.values()])
    for name, file in files.items():
        ridge = [choose(fitted(features[each["image"]]), [states[noun] for noun in options(each)]) for each in file]
        right = [options(each).index(each["conversations"][1]["value"]) for each in file]
        print(
            f"{name}: ridge regression {np.mean(np.equal(ridge, right)):.3f} of {len(file)}; {nearest(file, features)}"
        )


def nouns_of(records: list[dict]) -> dict[str, str]:
    """Return the noun of each unvaried training image that has a choice or a name."""
    found = {}
    for each in records:
        turns = [turn["value"] for turn in each["conversations"]]
        for question, answer in zip(turns[::2], turns[1::2]):
            if each.get("image", "").endswith(".0.png") and re.search("Which is|What is", question):
                found[each["image"]] = answer
    return found


def options(record: dict) -> list[str]:
    """Return the four nouns of a choice."""
    names = re.search(r"Which is it: (.*)\?", record["conversations"][0]["value"])[1]
    return re.split(r", | or ", names)


@torch.inference_mode()
def describe(folder: Path, images: list[str]) -> torch.Tensor:
    """Return class token and mean patch of each image, (images, 2 x width)."""
    tower, found = Dinov2Model.from_pretrained(folder / "tower").eval(), []
    mean, deviation = (torch.tensor(PROCESSOR[key]) for key in ("image_mean", "image_std"))
    for first in range(0, len(images), BATCH):
        pixels = [np.array(Image.open(folder / "images" / name)) for name in images[first : first + BATCH]]
        pixels = ((torch.from_numpy(np.stack(pixels)) / 255 - mean) / deviation).permute(0, 3, 1, 2)
        states = tower.layernorm(tower(pixels, output_hidden_states=True).hidden_states[LAYER])
        found.append(torch.cat([states[:, 0], states[:, 1:].mean(1)], 1))
    return torch.cat(found)


@torch.inference_mode()
def read(folder: Path, nouns: list[str]) -> torch.Tensor:
    """Return the language model's hidden state of each noun, (nouns, width)."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "language_model")
    model = AutoModelForCausalLM.from_pretrained(folder / "language_model", dtype=torch.float32).eval()
    texts = [tokenizer(f"This is a picture of a {noun}", return_tensors="pt") for noun in nouns]
    return torch.stack([model(**each, output_hidden_states=True).hidden_states[STATE][0, -1] for each in texts])


def fit(features: torch.Tensor, states: list[torch.Tensor]):
    """Fit ridge regression from features to standardized hidden states. Returns its function for one image."""
    mean, deviation = features.mean(0), features.std(0)
    targets = torch.stack(states)
    inputs, middle, scale = (features - mean) / deviation, targets.mean(0), targets.std(0)
    penalty = RIDGE * torch.eye(inputs.shape[1])
    weight = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ ((targets - middle) / scale))
    return lambda one: (((one - mean) / deviation) @ weight, middle, scale)


def choose(predicted: tuple[torch.Tensor, ...], states: list[torch.Tensor]) -> int:
    """Return the number of the state that is most similar to the predicted one."""
    wanted, middle, scale = predicted
    return int(torch.cosine_similarity((torch.stack(states) - middle) / scale, wanted[None]).argmax())


def nearest(file: list[dict], features: dict[str, torch.Tensor]) -> str:
    """Answer each question with the noun whose other images have the nearest mean. Returns the accuracy as text."""
    shown: dict[str, set[str]] = {}
    for each in file:
        shown.setdefault(each["conversations"][1]["value"], set()).add(each["image"])
    hits = []
    for each in file:
        others = [shown[noun] - {each["image"]} for noun in options(each)]
        if all(others):
            means = torch.stack([torch.stack([features[image] for image in images]).mean(0) for images in others])
            chosen = int(torch.cosine_similarity(means, features[each["image"]][None]).argmax())
            hits.append(options(each)[chosen] == each["conversations"][1]["value"])
    return f"nearest mean {np.mean(hits):.3f} of {len(hits)}" if hits else "no four nouns with two images each"


if __name__ == "__main__":
    main()
