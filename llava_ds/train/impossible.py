"""What a model can't be trained with, whatever further flags say: told before those flags are asked for."""

from llava_ds.config.arguments import Arguments
from llava_ds.constants import ConfigError, DataError, FlagProblems
from llava_ds.engine.ds_config.parallel import check_axes
from llava_ds.model.open.folder import ModelFolder, read_folder, ready_problems
from llava_ds.model.open.merged_adapters import is_adapter
from llava_ds.model.upcycling import check_upcycled


def refuse_impossible(problems: FlagProblems) -> None:
    """Raise ConfigError where the model refuses some of the flags: with that reason alone, as no further flag helps, or,
    where an axis has to go, before the other problems. problems: of the command line, without regard to its model."""
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
        check_axes(args, folder.text_config)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{problems}") from None


def _never(args: Arguments, folder: ModelFolder) -> list[str]:
    if folder.ready is not None:
        return ready_problems(args, folder)
    try:
        check_upcycled(args, folder.text_config)
    except ConfigError as error:
        return str(error).splitlines()
    return []
