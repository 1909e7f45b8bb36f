"""See what would be trained on: python run/inspect_data.py --model_name_or_path vicuna --data_path my.json ...

Takes the data and model flags of run/train.py (others are passed over), checks and encodes every record as training
does, and shows the first samples with the supervised part marked. Only the model's tokenizer is read.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from llava_ds.arguments import Arguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, ConfigError, DataError
from llava_ds.data.dataset import EncodedDataset, open_data
from llava_ds.data.encode import add_missing_marks, refuse_unfit_tokenizer
from llava_ds.data.preflight import media_from_text
from llava_ds.distributed import exit_for_bad_input, print_first, progress_bar, quiet_libraries
from llava_ds.model.language import length_note, length_problem, read_text_config
from llava_ds.model.vision import read_tower
from llava_ds.parsing import parse_arguments
from llava_ds.report.data_page import in_terminal, page, supervised_text
from llava_ds.tiny import CLIP_PATH
from llava_ds.tiny import default as tiny
from llava_ds.tokenizer import open_tokenizer
from llava_ds.tools.samples import shown_sample


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--num_samples", type=int, default=3, help="samples to show here (default: %(default)s)")
    parser.add_argument(
        "--jsonl", type=os.path.expanduser, help="write one object per record, accepted or rejected, to this file"
    )
    parser.add_argument(
        "--html", type=os.path.expanduser, help="write a page with samples, their pictures and the mask to this file"
    )
    parser.add_argument("--html_samples", type=int, default=30, help="samples on the page (default: %(default)s)")
    own, rest = parser.parse_known_args(argv)
    if problems := [p for name in ("jsonl", "html") if (p := _cannot_be_written(name, getattr(own, name)))]:
        raise ConfigError("\n".join(problems))
    args, _ = parse_arguments(rest, to_train=False, own_flags=[f"--{name}" for name in vars(own)])

    quiet_libraries()
    if args.model.model_name_or_path is not None and args.model.vision_tower is None:
        print("no --vision_tower: pictures are prepared and counted as for the tiny model's")
        args = args.replaced(vision_tower=str(CLIP_PATH))
    args = tiny.fill_in(args)
    if args.data.data_path is None:
        raise ConfigError("--data_path is missing: name your records")
    tokenizer = open_tokenizer(args.model.model_name_or_path)
    if args.model.mm_use_im_start_end and (added := add_missing_marks(tokenizer)):
        print(f"added to the tokenizer, to show the ids: {', '.join(added)}; training refuses a model without them")
    refuse_unfit_tokenizer(args.model, tokenizer)
    if note := _length_note(args):
        print_first(note)
    pictures = read_tower(args.model.vision_tower, args.model).pictures(args)
    dataset = open_data(args, tokenizer, pictures, refuse_bad=False)
    print_first(*dataset.summary())
    for i in range(min(own.num_samples, len(dataset))):
        print("\n" + in_terminal(shown_sample(dataset, i, tokenizer), sys.stdout.isatty()))
    if own.jsonl is not None:
        with Path(own.jsonl).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(dataset, tokenizer))
    if own.html is not None:
        samples = (shown_sample(dataset, i, tokenizer, True) for i in range(min(own.html_samples, len(dataset))))
        text = page(args.data.data_path, dataset.summary(), samples, dataset.rejections())
        Path(own.html).write_text(text, encoding="utf-8")


def _cannot_be_written(name: str, path: str | None) -> str | None:
    """Why a file that the user named can't be made, to be known before the work; None if it can, or none was named."""
    if path is None:
        return None
    folder = Path(path).parent
    if not folder.is_dir():
        return f"--{name} {path}: there is no folder {folder}: make it, or name another file"
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        return f"--{name} {path} can't be written to: name another file"
    return None


def _length_note(args: Arguments) -> str | None:
    """What training would refuse or say of the model's configuration and --model_max_length; None for nothing."""
    folder = args.model.model_name_or_path
    if not (Path(folder) / "config.json").is_file():
        return None
    try:
        config = read_text_config(folder)
        problem = length_problem(config, args.data.model_max_length)
    except ConfigError as error:
        problem = str(error)
    return length_note(config, args.data.model_max_length) if problem is None else f"training would end here: {problem}"


def rows(dataset: EncodedDataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, object]]:
    """One object per record, in the files' order: its ids, labels and sizes, or why it is left out."""
    for i in progress_bar(iterable=range(dataset.num_records), desc="writing", unit="record"):
        row = dataset.row(i)
        if row["reason"] is not None:
            yield {"id": row["id"], "rejected": row["reason"]}
            continue
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        yield {
            "id": row["id"],
            "input_ids": ids,
            "labels": labels,
            "supervised_text": supervised_text(ids, labels, tokenizer),
            "num_image_tokens": ids.count(IMAGE_TOKEN_INDEX),
            "image_sizes": [size for one in media_from_text(row["media"]) for size in one.sizes],
        }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError) as error:
        exit_for_bad_input(error, "run/inspect_data.py")
