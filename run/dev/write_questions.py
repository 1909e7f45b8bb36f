"""Write questions about generated scenes, for make grpo and its like: run/dev/write_questions.py FOLDER

train.json: four of five ask for a number, which the tuned tiny model is worst at; the others ask all else, so that it
is not forgotten. With --even all kinds come equally often. heldout.json: other scenes; 1,000 ask for a number, and
--others of every other kind. With --descriptions all ask for a description of the picture, 1,000 of them held out.
"""

import argparse

from llava_ds.tiny.questions import KINDS
from llava_ds.tiny.scene_files import DESCRIBE, write_questions

OTHERS = [kind for kind in KINDS if kind != "count"]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=16_000)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--descriptions", action="store_true")
    args = parser.parse_args()
    train = ["count" if i % 5 else OTHERS[i // 5 % len(OTHERS)] for i in range(args.train)]
    heldout = ["count"] * 1000 + [kind for kind in OTHERS for _ in range(args.others)]
    if args.even:
        train = [KINDS[i % len(KINDS)] for i in range(args.train)]
    if args.descriptions:
        train, heldout = [DESCRIBE] * args.train, [DESCRIBE] * 1000
    write_questions(args.folder, args.seed, {"train": (train, False), "heldout": (heldout, True)})


if __name__ == "__main__":
    main()
