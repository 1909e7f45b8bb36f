"""Check the training flags before the slow imports.

Flags that contradict the model are reported before missing flags.
"""

import os
from typing import TYPE_CHECKING

from llava_ds.constants import ConfigError, DataError, FlagProblems

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments
    from llava_ds.model.open.model_folder import ModelFolder


def read_flags(argv: list[str]) -> None:
    """Check the flags. Raises ConfigError; flags that the model refuses are reported before missing ones."""
    from llava_ds.config.parsing import read_training_flags  # the import takes most of a second

    try:
        read_training_flags(argv)
    except FlagProblems as error:
        _refuse_impossible(error)
        raise


def _refuse_impossible(problems: FlagProblems) -> None:
    """Raise ConfigError if the model can't be read or can't be trained with the given flags.

    If the model can't be trained whatever flags are added, only the reasons are reported. If its folder can't be read,
    or extensions that the flags select can't train it, the message also contains `problems`.

    problems: the problems of the command line, found without the model.
    """
    # Not imported at the top: this takes seconds, and is needed only after an error.
    from llava_ds.engine.ds_config.parallel import check_model
    from llava_ds.files.model_files import is_adapter
    from llava_ds.model.open.folder import read_folder

    args = problems.arguments
    path = args.model.model_name_or_path
    if path is None or not os.path.isdir(path) or (is_adapter(path) and args.model.model_base is None):
        return
    try:
        folder = read_folder(path, args.model.model_base)
    except (DataError, OSError):
        return  # training reports this error once the flags are valid
    except ConfigError as error:
        raise ConfigError(f"{error}\n{problems}") from None
    if lines := _never(args, folder):
        raise ConfigError("\n".join(lines))
    try:
        check_model(args, folder.text_config)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{problems}") from None


def _never(args: "Arguments", folder: "ModelFolder") -> list[str]:
    """Return the reasons why the model can't be trained, without the extensions that the flags select."""
    from llava_ds.extensions.active import active

    if folder.architecture is not None:
        return folder.problems(args)
    return active((), folder.text_config).check_model(args, folder.text_config)
