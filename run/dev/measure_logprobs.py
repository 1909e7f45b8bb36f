"""Measure the cost of recording the probabilities of answers: python run/dev/measure_logprobs.py --model_path RUN

Asks the same eval questions with and without recording them, in turns, and prints the medians of the rounds' CPU
seconds: those of this process, so that others on the machine count for little.
"""

import argparse
import statistics
import time

import torch
from transformers import LogitsProcessor

from llava_ds.evaluation.benchmark_files import Given
from llava_ds.evaluation.tasks import read_questions
from llava_ds.infer import generate
from llava_ds.infer.generate import Prompt, greedy_answers
from llava_ds.infer.load import LoadedModel, load_model
from llava_ds.tiny.default import heldout_data


class Nothing(LogitsProcessor):
    """In the place of what records."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores

    def totals(self, new: torch.Tensor, stops: list[int]) -> list[tuple[float, int]]:
        return [(0.0, 0)] * len(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="output/tiny-finetune")
    parser.add_argument("--cache_dir", default="~/.cache/llava_ds")
    parser.add_argument("--questions", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    loaded = load_model(args.model_path)
    data_path, folder = heldout_data(args.cache_dir)
    questions = read_questions("llava", Given(data_path, image_folder=folder), args.questions)
    prompts, recorder = [question.prompt for question in questions], generate._GreedyLogprobs
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    round_of(loaded, prompts)  # warm-up
    for _ in range(args.rounds):
        for name, kind in (("without", Nothing), ("with", recorder)):
            generate._GreedyLogprobs = kind
            seconds[name].append(round_of(loaded, prompts))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"CPU seconds per {len(prompts)} questions, medians of {args.rounds}: {medians}")
    print(f"with probabilities: {medians['with'] / medians['without'] - 1:+.1%}")


def round_of(loaded: LoadedModel, prompts: list[Prompt]) -> float:
    """CPU seconds of asking them all."""
    begin = time.process_time()
    greedy_answers(loaded, prompts, batch_size=48)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
