"""Show the data of a training run: python run/inspect_data.py --model_name_or_path vicuna --data_path my.json ...

Takes the data and model flags of run/train.py (others are ignored), checks and encodes every record like training, and
shows the first samples with the supervised part marked. Only the model's tokenizer is read.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llava_ds.config.bounds import NotNegative, number
from llava_ds.constants import ConfigError
from llava_ds.runtime.command import Parser, begin, exit_with, given_path

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

HTML_SAMPLES = 30


def parse(argv: list[str]) -> "tuple[argparse.Namespace, Arguments]":
    """Parse this script's flags and training's. Raises ConfigError."""
    from llava_ds.config.parsing import parse_arguments  # Ctrl-C has to work during the import

    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--num_samples", type=number(NotNegative), default=3, help="samples to print (default: %(default)s)")
    add("--jsonl", type=given_path, help="write one object per record, accepted or rejected, to this file")
    add("--html", type=given_path, help="write a page with samples, their images and the mask to this file")
    add("--html_samples", type=number(NotNegative), help=f"samples on the page (default: {HTML_SAMPLES})")
    own, rest = parser.parse_known_args(argv)
    if own.html_samples is not None and own.html is None:
        raise ConfigError("--html_samples goes with --html: give that, or leave it out")
    if problems := [p for name in ("jsonl", "html") if (p := _cannot_be_written(name, getattr(own, name)))]:
        raise ConfigError("\n".join(problems))
    args, _ = parse_arguments(rest, to_train=False, own_flags=[f"--{name}" for name in vars(own)])
    return own, args


def _cannot_be_written(name: str, path: str | None) -> str | None:
    """Return why a flag's file can't be created, or None. Called before the data are encoded."""
    if path is None:
        return None
    folder = Path(path).parent
    if not folder.is_dir():
        return f"--{name} {path}: the folder {folder} does not exist: make it, or name another file"
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        return f"--{name} {path} can't be written to: name another file"
    return None


if __name__ == "__main__":
    begin(
        "run/inspect_data.py",
        reads=parse,
        ends_without_reader=not {"--jsonl", "--html"} & {token.split("=")[0] for token in sys.argv},
    )


import json
from collections.abc import Iterator
from functools import partial

from transformers import PreTrainedTokenizerBase

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.dataset import EncodedDataset, open_data
from llava_ds.data.encoded_rows import media_from_text
from llava_ds.data.end_markers import refuse_unfit_tokenizer
from llava_ds.extensions.active import folder_part
from llava_ds.files.model_files import is_adapter, read_json_if_there
from llava_ds.files.writing import write_output
from llava_ds.model.families.language import length_note, length_problem
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import fit_vocabulary, read_parts
from llava_ds.model.open.tower import read_tower
from llava_ds.model.vision import TowerPlan
from llava_ds.runtime.ranks import print_first, progress_bar, quiet_libraries
from llava_ds.template_variables import set_variables
from llava_ds.tiny import CLIP_PATH
from llava_ds.tiny import default as tiny
from llava_ds.tokenizer import add_image_tokens, open_tokenizer
from llava_ds.tracking.data_page import in_terminal, page, supervised_text
from llava_ds.tracking.sample_text import shown_sample


def main(argv: list[str]) -> None:
    own, args = parse(argv)
    most = HTML_SAMPLES if own.html_samples is None else own.html_samples
    quiet_libraries()
    args = tiny.fill_in(args)
    if args.data.data_path is None:
        raise ConfigError("--data_path is missing: name your records")
    args, tokenizer, tower = _model(args)
    refuse_unfit_tokenizer(args.model, tokenizer)
    image_options = tower.image_options(args)
    dataset = open_data(args, tokenizer, image_options, refuse_bad=False)
    print_first(*dataset.summary())
    for i in range(min(own.num_samples, len(dataset))):
        print("\n" + in_terminal(shown_sample(dataset, i, tokenizer), sys.stdout.isatty()))
    if own.jsonl is not None:
        write_output(Path(own.jsonl), partial(_write_rows, dataset, tokenizer), "--jsonl")
    if own.html is not None:
        samples = (shown_sample(dataset, i, tokenizer, True) for i in range(min(most, len(dataset))))
        text = page(args.data.data_path, dataset.summary(), samples, dataset.rejections())
        write_output(Path(own.html), text, "--html")


def _write_rows(dataset: EncodedDataset, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(dataset, tokenizer))


def _model(args: "Arguments") -> "tuple[Arguments, PreTrainedTokenizerBase, TowerPlan]":
    """Return the flags completed by the model's settings, its tokenizer and its tower.

    The folder may have only a tokenizer; images are then prepared as for the tiny model. Prints why training would
    refuse the model or --model_max_length. Raises ConfigError if the samples can't be shown without the model.
    """
    folder = Path(args.model.model_name_or_path)
    tower, tokenizer = None, None
    if (folder / "config.json").is_file() or is_adapter(folder):
        try:
            args, notes = take_from_model(args)
            parts = read_parts(args.model)
            tower, tokenizer = parts.tower, parts.open_tokenizer()
            print_first(*notes)
            _add_tokens(tokenizer, args.model)
            _, _, lines = fit_vocabulary(parts.text_config, parts.sources, tokenizer, args.model)
            print_first(*lines)
            problem = length_problem(parts.text_config, args.data.model_max_length)
            note = length_note(parts.text_config, args.data.model_max_length)
        except ConfigError as error:
            if args.model.vision_tower is not None or _is_ready(folder):
                raise
            problem, note = str(error), None
        if problem is not None:
            note = f"training would end here: {problem}"
        if note is not None:
            print_first(note)
    if tower is None:
        if args.model.vision_tower is None:
            print("no --vision_tower: images are prepared and counted as for the tiny model's tower")
            args = args.replaced(vision_tower=str(CLIP_PATH))
        tower = read_tower(args.model.vision_tower, args.model)
    if tokenizer is None:
        tokenizer = open_tokenizer(str(folder))
        _add_tokens(tokenizer, args.model)
    print_first(*set_variables(tokenizer, args.model.chat_template_kwargs, args.model.version))
    return args, tokenizer, tower


def _is_ready(folder: Path) -> bool:
    """Return True for a ready model, whose conversations and images only its own template and tower can prepare."""
    kind = read_json_if_there(folder / "config.json", f"--model_name_or_path {folder}").get("model_type")
    return folder_part(kind) is not None


def _add_tokens(tokenizer: PreTrainedTokenizerBase, args: ModelArguments) -> None:
    if added := add_image_tokens(tokenizer, args):
        print(f"added to the tokenizer: {', '.join(added)}")


def rows(dataset: EncodedDataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, object]]:
    """Yield an object per record, in the files' order: its ids, labels and image sizes, or why it is rejected."""
    for i in progress_bar(iterable=range(dataset.num_records), desc="writing", unit="record"):
        row = dataset.row(i)
        if row["reason"] is not None:
            yield {"id": row["id"], "rejected": row["reason"]}
            continue
        ids, labels = row["input_ids"], row["labels"]
        yield {
            "id": row["id"],
            "input_ids": ids,
            "labels": labels,
            "supervised_text": supervised_text(ids, labels, tokenizer),
            "num_image_tokens": ids.count(IMAGE_TOKEN_INDEX),
            "image_sizes": [size for one in media_from_text(row["media"]) for size in one.sizes],
            **({} if row["weights"] is None else {"weights": row["weights"]}),
        }


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/inspect_data.py")
