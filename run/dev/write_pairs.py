"""Write pairs of answers to questions about generated scenes, for make dpo and make reward:
run/dev/write_pairs.py FOLDER

FOLDER contains train.json and heldout.json from run/dev/write_questions.py. PREFIX-train.json and PREFIX-heldout.json
are written there, with the correct answer as chosen. The rejected answer is a random wrong answer to such a question,
or with --drawn_from a model's own, as likely as the model makes it among the wrong ones; with --drawn_kinds only for
questions of these kinds.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from llava_ds.data.sample import Message
from llava_ds.extensions.benchmarks.judging import Judge
from llava_ds.extensions.infer.engines import EngineOptions
from llava_ds.extensions.infer.generate import Prompt
from llava_ds.runtime.ranks import Ranks, progress_bar, quiet_libraries
from llava_ds.tiny.questions import ANSWERS, KINDS

TOGETHER = 16  # questions per batch


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prefix", default="pairs")
    parser.add_argument("--drawn_from", help="folder of the model that samples the rejected answers")
    parser.add_argument("--drawn_kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--train", type=int, default=16_000)
    parser.add_argument("--heldout", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    quiet_libraries()
    judge, device = None, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.drawn_from is not None:
        judge = Judge("--drawn_from", args.drawn_from, EngineOptions(), Ranks(0, 0, 1, device))
    for stream, name in enumerate(("train", "heldout")):
        records = json.loads((args.folder / f"{name}.json").read_text())[: getattr(args, name)]
        rng = np.random.default_rng([args.seed, stream])
        pairs = [to_pair(record, answer) for record, answer in zip(records, wrong_answers(records, args, judge, rng))]
        (args.folder / f"{args.prefix}-{name}.json").write_text(json.dumps(pairs, indent=1))


def wrong_answers(
    records: list[dict], args: argparse.Namespace, judge: Judge | None, rng: np.random.Generator
) -> list[str]:
    """Return a wrong answer to every record's question."""
    wrong = [[answer for answer in ANSWERS[each["kind"]] if answer != right(each)] for each in records]
    chances = [np.full(len(answers), 1 / len(answers)) for answers in wrong]
    if judge is not None:
        judged = [i for i, record in enumerate(records) if record["kind"] in args.drawn_kinds]
        with progress_bar(total=len(judged), desc="wrong answers judged", unit="question") as bar:
            for first in range(0, len(judged), TOGETHER):
                some = judged[first : first + TOGETHER]
                prompts = [prompt_of(records[i], args.folder) for i in some]
                for i, scores in zip(some, judge.scores(prompts, [wrong[i] for i in some])):
                    weights = np.array([math.exp(score - max(scores)) for score in scores])
                    chances[i] = weights / weights.sum()
                bar.update(len(some))
    return [answers[rng.choice(len(answers), p=chance)] for answers, chance in zip(wrong, chances)]


def prompt_of(record: dict, folder: Path) -> Prompt:
    """Return the record's question and image."""
    return Prompt((Message("human", record["conversations"][0]["value"]),), (str(folder / record["image"]),))


def right(record: dict) -> str:
    """Return the record's answer."""
    return record["conversations"][1]["value"]


def to_pair(record: dict, rejected: str) -> dict:
    """Return the record with two answers."""
    question = record["conversations"][:1]
    return {**record, "conversations": question, "chosen": right(record), "rejected": rejected}


if __name__ == "__main__":
    main()
