"""Read the mesh's axis sizes from flags and DeepSpeed JSON, and refuse models that can't be trained on its axes."""

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments, flag_default
from llava_ds.config.bounds import MOST
from llava_ds.config.properties import clashes, features
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.draft import AUTO, Draft, as_json
from llava_ds.engine.ds_config.optimizer import BITSANDBYTES, optimizer_name
from llava_ds.extensions.active import active, flags_class, reading


def with_axes(args: Arguments, raw: dict | None) -> Arguments:
    """Return the flags with the JSON's axis sizes. Call it before the ranks are laid out and the JSON is resolved.

    Raises ConfigError with every reason if sizes are invalid, exclude each other or differ from given flags.
    """
    raw, problems = raw or {}, []
    own = [flags_class(name).in_json(raw, problems) for name in reading(raw)]
    for flag, (size, key) in (item for each in own for item in each.items()):
        if size in (None, AUTO):
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST:
            problems.append(f'{key} is {as_json(size)} in the DeepSpeed JSON: write a whole number above 0, or "auto"')
        elif flag in args.given and (given := args.as_dict().get(flag, flag_default(flag))) != size:
            problems.append(
                f'{key} is {size} in the DeepSpeed JSON but --{flag} is {given}: make them equal, or write "auto"'
            )
        else:
            known, args = clashes(features(args)), args.replaced(**{flag: size})
            problems += [line for line in clashes(features(args)) if line not in known]
    if problems:
        raise ConfigError("\n".join(problems))
    return args


def take_axes(draft: Draft, own: dict) -> None:
    """Copy the JSON's axis sizes to the flags. own: the values of the extensions' keys, removed from the
    draft's JSON."""
    try:
        draft.args = with_axes(draft.args, draft.config | own)
    except ConfigError as error:
        for line in str(error).splitlines():
            draft.refuse(line)


def check_model(args: Arguments, text_config: PreTrainedConfig) -> None:
    """Raise ConfigError with every reason if extensions of the run can't train this language model."""
    if lines := active(args.own, text_config).check_model(args, text_config):
        raise ConfigError("\n".join(lines))


def for_engine(config: dict) -> dict:
    """Return a resolved JSON for DeepSpeed, without train_batch_size if the micro-batch size is given.

    DeepSpeed would compare train_batch_size with the number of all ranks, but some ranks may share samples.
    """
    follows = "train_micro_batch_size_per_gpu" in config
    own = {key: value for key, value in config.items() if key != "train_batch_size" or not follows}
    if "optimizer" in own and optimizer_name(own["optimizer"]) in BITSANDBYTES:
        del own["optimizer"]  # start_engine builds it
    return own
