"""Convert a checkpoint or a model folder to a model folder: python run/export.py output/mine/checkpoint-500 --format hf

SOURCE is a checkpoint of run/train.py, of any ZeRO stage and number of ranks; no GPU is needed. The run's flags are
read from run.json in its folder; the base models have to be in the folders named there, or in --model_name_or_path and
--vision_tower. Or SOURCE is a complete LLaVA model, in LLaVA's own format or transformers', or LoRA over one (merged
into it); several are merged by weight: run/export.py ONE --adapters OTHER THIRD --adapter_weights 0.5 0.3 0.2
"""

import argparse
import sys
from collections.abc import Callable

from llava_ds.config.bounds import DEFAULT_SHARD_SIZE, Count, Number, number, parse_size
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import choice, values_of
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.runtime.command import Parser, add_plugin_flag, begin, exit_with, given_path, load_plugins, new_folder

FORMS = ("hf", "llava", "adapter", "projector")
DTYPES = ("float32", "bfloat16", "float16")  # torch's names
FOLDERS = ("model_name_or_path", "model_base", "vision_tower", "pretrain_mm_mlp_adapter", "version")
ROWS = ("resize_token_embeddings", "pad_embeddings_to_multiple_of")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("source", type=given_path, metavar="SOURCE", help="checkpoint-<step> folder, or a model's folder")
    add(
        "--format",
        choices=[*FORMS, *values_of("format")],
        help="hf: for transformers; llava: for LLaVA's own code; adapter: of a LoRA run's checkpoint (other formats "
        "merge it); projector: mm_projector.bin; "
        + "".join(f"{form}: {title}; " for form, title in values_of("format").items())
        + "absent: the format of the run's own export, or hf",
    )
    add("--output_dir", type=new_folder, help="folder to write; absent: the source's name with the format appended")
    add(
        "--dtype",
        choices=["auto", *DTYPES, *values_of("dtype")],
        default="auto",
        help="auto: the dtype of training or of the folder, or the nearest that the format has"
        + "".join(f"; {dtype}: of {title}" for dtype, title in values_of("dtype").items()),
    )
    add("--max_shard_size", default=DEFAULT_SHARD_SIZE, help="largest file (default: %(default)s)")
    add("--model_name_or_path", type=given_path, help="current folder of a checkpoint's base language model")
    add("--pretrain_mm_mlp_adapter", type=given_path, help="current path of the projector that the run started from")
    add("--model_base", type=given_path, help="base model of an adapter")
    add(
        "--vision_tower", help="current folder of the vision tower; with --format llava, the name that its loader opens"
    )
    add(
        "--adapters",
        nargs="+",
        type=given_path,
        metavar="FOLDER",
        help="more adapters for the base model of the adapter in SOURCE, merged with it by weight",
    )
    add(
        "--adapter_weights",
        nargs="+",
        type=number(Number),
        metavar="WEIGHT",
        help="weights of SOURCE and of --adapters, in this order; absent: equal ones that add up to 1",
    )
    add(
        "--average",
        type=number(Count),
        default=1,
        metavar="N",
        help="average the weights of the checkpoint in SOURCE and the N - 1 before it",
    )
    add("--version", help="conversation template of a model folder that has none in its settings")
    _add_more(add)
    add(
        "--overwrite",
        action="store_true",
        help="write into a folder that is not empty: replaces a model of any format there, and keeps other files",
    )
    args = parser.parse_args(argv)
    parse_size(args.max_shard_size)
    load_plugins(args)
    return args


def _add_more(add: Callable[..., object]) -> None:
    add(
        "--resize_token_embeddings",
        action="store_true",
        default=None,
        help="add rows to the embedding and the output layer of a model folder for tokens that have none; new rows are "
        "the mean of the others",
    )
    add("--pad_embeddings_to_multiple_of", type=number(Count), help="round the number of rows up to a multiple of this")
    add_plugin_flag(add)


if __name__ == "__main__":
    begin("run/export.py", reads=parse)


import dataclasses
from functools import partial
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.trainer_file import is_training_checkpoint
from llava_ds.export.bit_check import check_written
from llava_ds.export.blending import open_adapters
from llava_ds.export.card import write_card, write_conversion_card
from llava_ds.export.export_plan import ExportPlan, hf_kind
from llava_ds.export.from_checkpoint import restore
from llava_ds.export.from_folder import open_folder
from llava_ds.export.output_folder import staged, write_folder
from llava_ds.export.reload_check import describe_bits
from llava_ds.export.tokenizer_files import refuse_lost_tokens
from llava_ds.runtime.ranks import quiet_libraries


def main(argv: list[str]) -> None:
    args = parse(argv)
    source, given = (
        Path(args.source),
        {name: value for name in (*FOLDERS, *ROWS) if (value := getattr(args, name)) is not None},
    )
    max_shard_bytes = parse_size(args.max_shard_size)
    dtype = getattr(torch, args.dtype) if args.dtype in DTYPES else None
    quiet_libraries()
    if not source.is_dir():
        raise ConfigError(f"{source}: the folder does not exist")
    restored = None
    if args.adapter_weights and not args.adapters:
        raise ConfigError("--adapter_weights goes with --adapters: name the other adapters, or leave it out")
    if is_training_checkpoint(source):
        if args.adapters:
            raise ConfigError("--adapters needs an adapter's folder: export the checkpoint as --format adapter")
        if wrong := [f"--{name}" for name in ("version", *ROWS) if name in given]:
            raise ConfigError(
                f"{', '.join(wrong)}: only for a model folder; a checkpoint's run.json sets it: leave out"
            )
        restored = restore(source, given, dtype, args.average)
        form, export, entries = args.format or restored.export.form, restored.export, restored.entries
    else:
        if args.average > 1:
            raise ConfigError(f"--average {args.average} needs a checkpoint, but SOURCE is not one: leave it out")
        for name in ("model_name_or_path", "pretrain_mm_mlp_adapter"):
            if name in given:
                raise ConfigError(f"--{name} needs a checkpoint, but SOURCE is not one: leave it out")
        if ROWS[1] in given and ROWS[0] not in given:
            raise ConfigError(f"--{ROWS[1]} has no effect without --{ROWS[0]}: give that, or leave it out")
        form = args.format or "hf"
        if args.adapters:
            folders = [source, *map(Path, args.adapters)]
            weights = args.adapter_weights or [1 / len(folders)] * len(folders)
            export, entries, lines = open_adapters(folders, weights, given, dtype, form)
        else:
            export, entries, lines = open_folder(source, given, dtype, form)
        print(*lines, *export.model.notes, sep="\n")
    export = dataclasses.replace(export, form=form, max_shard_bytes=max_shard_bytes)
    if form not in FORMS:
        export = choice("format", form).planned(export, args.dtype)
    _check_form(export, args.dtype, has_adapter=restored is not None and export.adapter is not None)
    output_dir = Path(args.output_dir or f"{str(source).rstrip('/')}-{form}")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not args.overwrite:
        raise ConfigError(f"--output_dir {output_dir} is not empty: name another folder, or give --overwrite")
    _check_is_not_read(output_dir, source, export)
    with staged(output_dir) as stage:
        if form == "adapter":
            written = export.adapter.write_restored(export, restored.trained, restored.base, source, stage)
        else:
            written = write_folder(export, entries, stage)
        checked = f" ({describe_bits('full', partial(check_written, written))})" if written else ""
        if restored is not None:
            step = commit.step_of(source.resolve())
            write_card(stage, form, restored.run, restored.run_dir, restored.record, step)
        else:
            write_conversion_card(stage, form, source)
    print(f"{form}: {output_dir}{checked}")


def _check_is_not_read(output_dir: Path, source: Path, export: ExportPlan) -> None:
    """Raise ConfigError if the export would overwrite a model that it reads: it may be the only copy."""
    given = vars(export.model.sources)
    sources = [*(part for name, part in given.items() if name != "own"), *given["own"].values()]
    parts = [each for part in sources if part is not None for each in (part, part.beside) if each is not None]
    paths = [source, *(Path(part.path) for part in parts)]
    if output_dir.resolve() in [(path.parent if path.is_file() else path).resolve() for path in paths]:
        raise ConfigError(f"--output_dir {output_dir} holds a model that this export reads: name another folder")


def _check_form(export: ExportPlan, dtype: str, has_adapter: bool) -> None:
    if export.form == "adapter" and not has_adapter:
        raise ConfigError("--format adapter needs a LoRA run's checkpoint, but SOURCE is not one: give hf or llava")
    own = next((each.values["format"] for each in EXTENSIONS.values() if dtype in each.values.get("dtype", ())), None)
    if own is not None and export.form not in own:
        raise ConfigError(f"--dtype {dtype} goes with --format {own[0]}: give float32, bfloat16 or float16")
    if export.form == "llava":
        refuse_lost_tokens(export.model.tokenizer)
    kind, why = hf_kind(export.model, export.args, export.image_options)
    if export.form == "hf" and kind is None:
        raise ConfigError(f"--format hf is not possible: {why}; or give --format llava")


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/export.py")
