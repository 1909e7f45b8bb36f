"""Write questions about generated scenes, for make grpo and similar targets: run/dev/write_questions.py FOLDER

train.json: four of five questions request a number, the tuned tiny model's weakest kind; the others cover all other
kinds, so that they are not forgotten. --counting sets another share, and --twice more of one other kind. heldout.json:
other scenes; 1,000 number questions, and --others of every other kind. With --descriptions, all questions request a
description of the image, 1,000 of them held out.
"""

import argparse

from llava_ds.tiny.questions import KINDS
from llava_ds.tiny.scene_splits import DESCRIBE, write_questions

OTHERS = [kind for kind in KINDS if kind != "count"]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=16_000)
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--counting", type=float, default=0.8)
    parser.add_argument("--twice", choices=OTHERS, help="the other kind that gets twice as many questions as the rest")
    parser.add_argument("--descriptions", action="store_true")
    args = parser.parse_args()
    upto = [int(i * args.counting + 1e-9) for i in range(args.train + 1)]  # counting questions among the first i
    others = [*OTHERS, *([args.twice] if args.twice else [])]
    train = ["count" if upto[i + 1] > upto[i] else others[(i - upto[i]) % len(others)] for i in range(args.train)]
    heldout = ["count"] * 1000 + [kind for kind in OTHERS for _ in range(args.others)]
    if args.descriptions:
        train, heldout = [DESCRIBE] * args.train, [DESCRIBE] * 1000
    write_questions(args.folder, args.seed, {"train": (train, False), "heldout": (heldout, True)})


if __name__ == "__main__":
    main()
