"""Score a model on held-out questions: python run/evaluate.py --model_path output/tiny-finetune

Without --data_path the questions are about generated scenes that no training image shows. --task names a benchmark with
files on this disk; docs/benchmarks.md lists the files. On every local device: deepspeed run/evaluate.py ... With
--output, the same command resumes an interrupted evaluation.
"""

import argparse
import os
import sys

from llava_ds.config.bounds import Count, NotNegative, Seed, number
from llava_ds.constants import ConfigError
from llava_ds.extensions.benchmarks.task_names import CHOSEN_METRICS, TASK_NAMES, TURNS
from llava_ds.extensions.infer.infer_flags import EngineOptions, add_engine_flags, parse_engine_options
from llava_ds.runtime.command import Parser, begin, exit_with, given_path, new_folder

MOST_NEW_TOKENS = 64
WITH_ANSWERS = ("llava", "caption", "preference")  # tasks whose questions include their answers


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add_engine_flags(parser)
    add("--task", choices=TASK_NAMES, default="llava", help="benchmark (default: a file in LLaVA's format)")
    add("--data_path", type=given_path, help="the questions; in LLaVA's format 'kind' groups the scores")
    add("--annotations", type=given_path, help="the answers, if the benchmark has them in another file or folder")
    add("--image_folder", type=given_path, help="folder that the image paths are relative to")
    add(
        "--metric",
        default="exact",
        help=f"for --task llava: one of {', '.join(CHOSEN_METRICS)}, or file.py:function "
        "that gets lists of prompts, completions, references and ids (default: %(default)s)",
    )
    add("--split", help="split of ScienceQA (default: test), or of --data_path with --task llava or preference")
    add("--limit", type=number(Count), help="ask the first questions only")
    add(
        "--turns",
        choices=TURNS,
        default="together",
        help="for --task llava: together asks a later question after the record's earlier turns with their true "
        "answers; each asks every question by itself (default: %(default)s)",
    )
    add("--compare_blank_image", action="store_true", help="ask again with every image replaced by a blank one")
    add("--compare_without_image", action="store_true", help="ask again without images and their marks in the prompt")
    add(
        "--show_wrong",
        type=number(NotNegative),
        default=0,
        metavar="N",
        help="print N wrong answers with reference and images, the most confident first (default: %(default)s)",
    )
    add("--batch_size", type=number(Count), default=48, help="questions per batch on a device (default: %(default)s)")
    add("--max_new_tokens", type=number(Count), help=f"longest answer in tokens (default: {MOST_NEW_TOKENS})")
    add(
        "--best_of",
        type=number(Count),
        metavar="N",
        help="sample N answers to each question (by --seed), and take the one with the highest score",
    )
    add("--reward_model_name_or_path", type=given_path, help="folder of the reward model that scores --best_of")
    add(
        "--output",
        type=given_path,
        help="write the scores to this .json file, and every answer to a .jsonl file of the same name",
    )
    add("--resamples", type=number(Count), default=1000, help="resamples of bootstrap intervals (default: %(default)s)")
    add("--seed", type=number(Seed), default=0, help="seed of the bootstrap and of --best_of (default: %(default)s)")
    add(
        "--cache_dir",
        type=new_folder,
        default="~/.cache/llava_ds",
        help="folder for generated scenes and the images inside benchmarks",
    )
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # added by deepspeed's launcher
    args = parser.parse_args(argv)
    refuse_contradictions(args)
    parse_engine_options(args)
    return args


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise ConfigError for conflicting flags."""
    if (args.best_of is None) != (args.reward_model_name_or_path is None):
        raise ConfigError("--best_of N and --reward_model_name_or_path FOLDER go together: give both or none")
    if args.best_of is not None and args.task == "preference":
        raise ConfigError("--best_of samples answers, and --task preference compares given ones: leave one out")
    if args.data_path is None and args.task != "llava":
        raise ConfigError(f"--data_path is missing: name {args.task}'s questions")
    for name in ("image_folder", "annotations"):
        if args.data_path is None and (value := getattr(args, name)) is not None:
            raise ConfigError(
                f"--{name} {value} goes with --data_path: the generated questions have their own images and answers, "
                "give that, or leave it out"
            )
    if args.image_folder is not None and not os.path.isdir(args.image_folder):
        raise ConfigError(f"--image_folder {args.image_folder}: the folder does not exist")
    if args.annotations is not None and args.task in WITH_ANSWERS:
        raise ConfigError(
            f"--annotations {args.annotations}: --task {args.task} reads the answers in --data_path: leave it out"
        )
    if args.max_new_tokens is not None and args.task == "preference":
        raise ConfigError("--max_new_tokens limits generation, but --task preference generates nothing: leave it out")
    args.max_new_tokens = args.max_new_tokens or MOST_NEW_TOKENS
    if ":" not in args.metric and args.metric not in CHOSEN_METRICS:
        raise ConfigError(f"--metric {args.metric}: give one of {', '.join(CHOSEN_METRICS)}, or file.py:function")
    if args.metric != "exact" and args.task != "llava":
        raise ConfigError(f"--metric goes with --task llava: {args.task} has its own scoring, leave it out")
    if args.turns != "together" and args.task != "llava":
        raise ConfigError(f"--turns goes with --task llava: {args.task}'s questions are one turn each, leave it out")
    if args.split is not None and args.task not in ("scienceqa", "llava", "preference"):
        raise ConfigError(
            f"--split goes with --task scienceqa, llava and preference: {args.task}'s files are one split each, leave "
            "it out"
        )
    if args.split is not None and args.data_path is None:
        raise ConfigError(f"--split {args.split} needs --data_path: give both")


if __name__ == "__main__":
    begin("run/evaluate.py", reads=parse)


import dataclasses
from functools import partial
from pathlib import Path

import torch

from llava_ds.engine.process_group import init_ranks
from llava_ds.export.card import add_evaluation
from llava_ds.extensions.benchmarks.answers import (
    BLANK_IMAGE,
    MAIN_COLUMN,
    WITHOUT_PICTURE,
    Part,
    Store,
    answer_rows,
    answered,
    open_store,
    write_answers,
    write_scores,
)
from llava_ds.extensions.benchmarks.answers_identity import identity_of, model_digest
from llava_ds.extensions.benchmarks.asking import Answering, ask, ask_each, open_batches, plan_batches
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import (
    Question,
    digest,
    with_blank_image,
    with_resized_sizes,
    without_image,
)
from llava_ds.extensions.benchmarks.score_table import as_json, interval_lines, legend, table
from llava_ds.extensions.benchmarks.scores import Scored, metric_of
from llava_ds.extensions.benchmarks.tasks import TASKS, read_questions
from llava_ds.extensions.infer.engines import load_for_inference
from llava_ds.extensions.infer.generate import Answer
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.runtime.launchers import rank_variables
from llava_ds.runtime.ranks import Ranks, check_same, first_rank_first, gather, print_first, quiet_libraries
from llava_ds.tiny.default import heldout_data
from llava_ds.tracking.mistakes import mistake_lines
from llava_ds.tracking.page import report_at_end
from llava_ds.tracking.run_files import is_run


def main(argv: list[str]) -> None:
    args = parse(argv)
    quiet_libraries()
    options = parse_engine_options(args)
    ranks = start(options)
    given, questions = read(args, ranks)
    metric = TASKS[args.task].metric or args.metric
    score = metric_of(metric)
    store, attempt = None, 1
    if args.output is not None:
        identity = identity_of(
            args.model_path,
            options,
            task=args.task,
            metric=metric,
            turns=args.turns,
            data=digest(questions),
            questions=len(questions),
            batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens,
            **drawn_by(args),
        )
        inputs = [path for path in (given.data_path, given.annotations) if path is not None]
        store, attempt = open_store(args.output, identity, inputs, ranks)
    asked = open_model(args, options, ranks)
    if isinstance(asked, LoadedModel):
        questions = with_resized_sizes(questions, asked.image_options)
    columns = {MAIN_COLUMN: questions}
    if args.compare_blank_image:
        columns[BLANK_IMAGE] = [with_blank_image(question) for question in questions]
    if args.compare_without_image:
        columns[WITHOUT_PICTURE] = [without_image(question) for question in questions]
    scored, rows = {}, {}
    for column, these in columns.items():
        answers = answers_to(these, column, asked, store, attempt, args, ranks)
        if ranks.is_first:
            scored[column] = score(these, [answer.text for answer in answers])
            model = os.path.basename(os.path.abspath(args.model_path))
            rows[column] = answer_rows(these, answers, scored[column], metric, model)
            if store is not None:
                write_answers(store, column, rows[column])
    if ranks.is_first:
        show(scored, rows[MAIN_COLUMN], given.data_path, store, args)


def read(args: argparse.Namespace, ranks: Ranks) -> tuple[Given, list[Question]]:
    """Return the flags that name the questions, and the questions, checked to be equal on all ranks."""
    with first_rank_first(ranks):
        data_path, image_folder = args.data_path, args.image_folder
        if data_path is None:
            data_path, image_folder = heldout_data(args.cache_dir)
        given = Given(data_path, args.annotations, image_folder, args.split, args.metric, args.turns, args.cache_dir)
        questions = read_questions(args.task, given, args.limit)
    remedy = "give every machine the same files, under the same paths"
    check_same({"the content of --data_path": digest(questions)}, ranks, remedy)
    return given, questions


def open_model(args: argparse.Namespace, options: EngineOptions, ranks: Ranks) -> LoadedModel | Answering:
    """Return the model that answers, or the object that compares given answers or samples several."""
    if args.task != "preference" and args.best_of is None:
        loaded = load_for_inference(args.model_path, options, ranks)
        print_first(*loaded.notes)
        return loaded
    # Imported here, because importing DeepSpeed takes seconds.
    from llava_ds.extensions.benchmarks.judging import BestOfN, Judge, Preferring

    if args.best_of is None:
        judge = Judge("--model_path", args.model_path, options, ranks)
        print_first(judge.describe())
        return Preferring(judge)
    own = dataclasses.replace(options, chat_template_kwargs=None)  # the variables are for the other model's template
    judge = Judge("--reward_model_name_or_path", args.reward_model_name_or_path, own, ranks, must_score=True)
    return BestOfN(args.model_path, judge, (args.best_of, args.max_new_tokens, args.seed), options, ranks)


def drawn_by(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that determine the answers of --best_of; {} without the flag."""
    if args.best_of is None:
        return {}
    judge = model_digest(args.reward_model_name_or_path, "--reward_model_name_or_path")
    return {"best_of": args.best_of, "reward_model": judge, "seed": args.seed}


def answers_to(
    questions: list[Question],
    column: str,
    asked: LoadedModel | Answering,
    store: Store | None,
    attempt: int,
    args: argparse.Namespace,
    ranks: Ranks,
) -> list[Answer]:
    """Return the answer to each question, on every rank. Reuses answers that earlier attempts stored."""
    known = answered(store, column, len(questions), ranks)
    if known:
        print_first(f"{column}: {len(known):,} of {len(questions):,} questions are answered already")
    part = Part(store, column, attempt, ranks)
    if isinstance(asked, LoadedModel):
        batches = open_batches(plan_batches(asked, questions, args.batch_size, ranks), known)
        ask(asked, questions, batches, part.keep, ranks, max_new_tokens=args.max_new_tokens, progress=column)
    else:
        numbers = list(range(len(questions)))
        batches = [numbers[first : first + args.batch_size] for first in numbers[:: args.batch_size]]
        own = open_batches(batches, known)[ranks.rank :: ranks.world_size]
        ask_each(own, lambda batch: asked([questions[i] for i in batch], batch), part.keep, column)
    part.close()
    for answers in gather(part.answers, ranks):
        known |= answers
    return [known[number] for number in range(len(questions))]


def show(
    scored: dict[str, Scored], rows: list[dict], data_path: str, store: Store | None, args: argparse.Namespace
) -> None:
    """Print the scores, write them to the store if there is one, and update the report of a run in the same folder.

    rows: answers to the questions with their images.
    """
    scores = as_json(scored, args.resamples, args.seed)
    if store is not None:
        named = {"task": args.task, "model_path": args.model_path, "data_path": data_path, "turns": args.turns}
        write_scores(store, {**named, **scores})
        into_card(scores, data_path, args)
    print_first(
        f"{scores['metric']} of {args.model_path} on {data_path}:",
        "95 % intervals:",
        *interval_lines(scores),
        *mistake_lines(rows, scores["metric"], args.show_wrong),
        *legend(list(scored), rows, args.turns),
        *table(scores),
    )
    if store is not None and is_run(store.output.parent):
        report_at_end(store.output.parent)


def into_card(scores: dict[str, object], data_path: str, args: argparse.Namespace) -> None:
    """Add the scores to the model's card, if this project wrote it; a failure is only a warning."""
    data = "generated scenes" if args.data_path is None else os.path.basename(os.path.abspath(data_path))
    name = (
        f"{data}{f', the first {args.limit:,}' if args.limit else ''}{', turns by themselves' * (args.turns == 'each')}"
    )
    folder = Path(args.model_path).expanduser()
    try:
        if add_evaluation(folder, name if args.task == "llava" else f"{args.task}, {name}", scores):
            print_first(f"scores added to the model card: {folder / 'README.md'}")
    except OSError as error:
        print_first(f"WARNING: the scores could not be added to {folder / 'README.md'} ({error.strerror})")


def start(options: EngineOptions) -> Ranks:
    """Return this process's rank. A single process with --engine hf starts without DeepSpeed and without a port."""
    variables = {**os.environ, **rank_variables(os.environ)[0]}
    if int(variables["WORLD_SIZE"]) > 1 or options.engine == "deepspeed":
        return init_ranks()
    return Ranks(0, 0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/evaluate.py")
