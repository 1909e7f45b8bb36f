"""The flags of training, read before anything that takes seconds to import.

What a model can't be trained with, whatever further flags say, is told before those flags are asked for.
"""

from typing import TYPE_CHECKING

from llava_ds.constants import ConfigError, DataError, FlagProblems
from llava_ds.runtime.cli import read_training_flags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments
    from llava_ds.model.open.folder import ModelFolder


def read_flags(argv: list[str]) -> None:
    """Check the flags. Raises ConfigError: for what the model can't be trained with before flags that are missing."""
    try:
        read_training_flags(argv)
    except FlagProblems as error:
        _refuse_impossible(error)
        raise


def _refuse_impossible(problems: FlagProblems) -> None:
    """Raise ConfigError where the model refuses some of the flags: with that reason alone, as no further flag helps;
    where an axis has to go, before the other problems.

    problems: of the command line, without regard to its model.
    """
    # Imports that take seconds, once something is wrong.
    from llava_ds.engine.ds_config.parallel import check_model
    from llava_ds.files.model_files import is_adapter
    from llava_ds.model.open.folder import read_folder

    args = problems.arguments
    path = args.model.model_name_or_path
    if path is None or (is_adapter(path) and args.model.model_base is None):
        return
    try:
        folder = read_folder(path, args.model.model_base)
    except (DataError, OSError):
        return  # training says so, once the flags are right
    if lines := _never(args, folder):
        raise ConfigError("\n".join(lines))
    try:
        check_model(args, folder.text_config)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{problems}") from None


def _never(args: "Arguments", folder: "ModelFolder") -> list[str]:
    """Lines of what the model itself brings, whatever extensions the flags ask for."""
    from llava_ds.extensions.active import active

    if folder.architecture is not None:
        return folder.problems(args)
    return active((), folder.text_config).check_model(args, folder.text_config)
