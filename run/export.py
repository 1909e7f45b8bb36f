"""Turn a checkpoint into a model folder: python run/export.py output/mine/checkpoint-500 --format hf

SOURCE is a checkpoint of run/train.py, of any ZeRO stage and number of ranks: neither the processes that wrote it nor
their GPUs are needed. run.json beside it says what was trained; the base models have to lie where it says, or where
--model_name_or_path and --vision_tower say.
"""

import argparse
from pathlib import Path

import torch

from llava_ds.checkpoint import commit
from llava_ds.constants import ConfigError, DataError
from llava_ds.distributed import exit_for_bad_input, quiet_libraries
from llava_ds.export.card import write_card
from llava_ds.export.finished import hf_kind
from llava_ds.export.llava import projector_entries, write_projector
from llava_ds.export.restored import restore
from llava_ds.export.shards import DEFAULT_SHARD_SIZE, parse_size
from llava_ds.export.write import WRITERS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="checkpoint-<step> folder")
    parser.add_argument(
        "--format",
        choices=["hf", "llava", "projector"],
        help="hf: for transformers; llava: for LLaVA's own code; projector: mm_projector.bin; absent: what the run "
        "itself leaves",
    )
    parser.add_argument("--output_dir", help="folder to write; absent: the source's name with the format behind it")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: that of training")
    parser.add_argument("--max_shard_size", default=DEFAULT_SHARD_SIZE, help="largest file (default: %(default)s)")
    parser.add_argument("--model_name_or_path", help="where the base language model lies now")
    parser.add_argument("--vision_tower", help="where the vision tower lies now")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds files already")
    args = parser.parse_args()

    max_bytes = parse_size(args.max_shard_size)
    quiet_libraries()
    source = Path(args.source)
    given = {name: getattr(args, name) for name in ("model_name_or_path", "vision_tower") if getattr(args, name)}
    restored = restore(source, given, DTYPES.get(args.dtype))
    form = args.format or restored.form
    kind, why = hf_kind(restored.finished.plan, restored.finished.args, restored.finished.pictures)
    if form == "hf" and kind is None:
        raise ConfigError(f"--format hf is not possible: {why}; or give --format llava")
    output_dir = Path(args.output_dir or f"{source}-{form}")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not args.overwrite:
        raise ConfigError(f"--output_dir {output_dir} is not empty: name another folder, or give --overwrite")
    output_dir.mkdir(parents=True, exist_ok=True)
    if form == "projector":
        write_projector(restored.finished, projector_entries(restored.entries), output_dir)
    else:
        WRITERS[form](restored.finished, restored.entries, output_dir, max_bytes)
        write_card(output_dir, form, restored.run, restored.run_dir, restored.record, commit.step_of(source.resolve()))
    print(f"{form}: {output_dir}")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        exit_for_bad_input(error, "run/export.py")
