"""Encode the data of a training run in advance: python run/encode.py --model_name_or_path vicuna --data_path my.json

Takes the data and model flags of run/train.py (others are ignored) and fills --cache_dir, so that training starts at
once. Needs no GPU. Start it on any number of machines, with the same flags and a shared --cache_dir: they divide the
work. If it is killed, start it again: it continues.
"""

import sys
from typing import TYPE_CHECKING

from llava_ds.config.recipes import RECIPES
from llava_ds.runtime.command import Parser, begin, exit_with

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments


def parse(argv: list[str]) -> "Arguments":
    """Parse the flags. Raises ConfigError."""
    from llava_ds.config.parsing import parse_arguments, tiny_defaults  # Ctrl-C has to work during the import

    _, rest = Parser(description=__doc__).parse_known_args(argv)
    return parse_arguments(rest, defaults=tiny_defaults(rest, RECIPES), to_train=False)[0]


if __name__ == "__main__":
    begin("run/encode.py", reads=parse)


from functools import partial

from llava_ds.data.dataset import open_data
from llava_ds.data.end_markers import refuse_unfit_tokenizer
from llava_ds.data.templates import resolve_template
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import print_first, quiet_libraries
from llava_ds.tiny import default as tiny


def main(argv: list[str]) -> None:
    """Encode the samples named by the flags."""
    quiet_libraries()
    args, notes = take_from_model(parse(argv))
    args = tiny.fill_in(args)
    args = args.replaced(version=resolve_template(args.model.version))
    print_first(*notes)
    model = plan_model(args.model, args.data.model_max_length)
    print_first(*model.notes)
    refuse_unfit_tokenizer(args.model, model.tokenizer)
    images = model.tower.image_options(args)
    data = args.data
    named = (
        (data.data_path, data.data_split),
        (data.eval_data_path, data.eval_data_split),
        *((flags.data_path, None) for flags in args.own.values()),
    )
    for path, split in [each for each in named if each[0]]:
        dataset = open_data(args.replaced(data_path=path, data_split=split), model.tokenizer, images)
        print_first(*dataset.summary(), f"encoded in {dataset.folder}; data fingerprint {dataset.fingerprint}")


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/encode.py")
