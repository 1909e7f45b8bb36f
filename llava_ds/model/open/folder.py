"""Read a model's folder: configurations and weights of its parts, and the flags that it was trained with.

read_folder reads a language model, a LLaVA in LLaVA's or transformers' format, or an adapter over one of them.
"""

from functools import partial

from llava_ds.config.arguments import Arguments, ModelArguments, trains_projector_only
from llava_ds.config.rules import data_problems
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import folder_part, opener_of
from llava_ds.files.model_files import ADAPTER_CONFIG, is_adapter
from llava_ds.model.families.language import is_llava_type, read_text_config, trunk_name
from llava_ds.model.open import names as formats
from llava_ds.model.open.model_folder import FLAG, ModelFolder, language_model_source, read_model_config

HF = ("llava", "llava_next", "llava_onevision")  # their config.json contains a text_config and a vision_config
PRETRAINED = "--pretrain_mm_mlp_adapter"


def read_folder(path: str, model_base: str | None = None) -> ModelFolder:
    """Read a folder of any format. model_base: an adapter's base model. Raises ConfigError and DataError."""
    if is_adapter(path):
        return opener_of(ADAPTER_CONFIG)(path, model_base)
    if model_base is not None:
        raise ConfigError(
            f"--model_base {model_base} needs an adapter, but {FLAG} {path} has no {ADAPTER_CONFIG}: leave it out"
        )
    config = read_model_config(path)
    kind = config.get("model_type")
    if kind in HF and "text_config" in config:
        from llava_ds.model.open.trained_folder import read_hf

        return read_hf(path, config)
    if (part := folder_part(kind)) is not None:
        return part.read(path, config, f"{FLAG} {path}")
    if kind == "llava_mpt":
        raise ConfigError(f"{FLAG} {path} is LLaVA's MPT: it is not supported: give a model of another family")
    if is_llava_type(kind):
        from llava_ds.model.open.trained_folder import read_llava

        return read_llava(path, config)
    text_config = read_text_config(path)
    rename = partial(formats.language_model_from_disk, trunk=trunk_name(text_config))
    return ModelFolder(
        path, "a language model", text_config, language_model_source(path, text_config, rename), tokenizer=path
    )


def projector_files(args: ModelArguments) -> dict[str, str]:
    """Map flags to the files that replace the model's projector. The last file also replaces newline and tower, if it
    contains them."""
    found = {} if args.pretrain_mm_mlp_adapter is None else {PRETRAINED: args.pretrain_mm_mlp_adapter}
    return found | {flag: file for flags in args.own.values() for flag, file in flags.projector_files().items()}


def take_from_model(args: Arguments) -> tuple[Arguments, list[str]]:
    """Fill in flags that the user did not give from the settings in the model's folder. Also returns lines to print.

    Raises ConfigError if given flags contradict the model, or if no flag accepts one of its settings.
    """
    path = args.model.model_name_or_path
    folder = None if path is None else read_folder(path, args.model.model_base)
    brings_projector = folder is not None and folder.projector is not None
    given_projector = bool(projector_files(args.model))
    lines = []
    if folder is not None:
        from llava_ds.model.open.trained_folder import flag_defaults, ignored_files

        if problems := folder.problems(args):
            raise ConfigError("\n".join(problems))
        lines += ignored_files(args, folder)
        values = flag_defaults(args, folder, brings_projector and not given_projector)
        args = args.replaced(**values)
        if problems := data_problems(args):
            raise ConfigError("\n".join(problems))
        if values or brings_projector:
            taken = ", ".join(f"--{name} {value}" for name, value in values.items()) or "nothing"
            lines.append(f"{path} is {folder.kind}; taken from it: {taken}")
        if args.model.vision_tower is not None and folder.vision_config is not None:
            lines.append(f"--vision_tower {args.model.vision_tower} is not read: the model has its own tower weights")
    if not (brings_projector or given_projector or trains_projector_only(args.model)):
        lines.append("without --pretrain_mm_mlp_adapter the projector starts from random numbers, not from stage 1")
    return args, lines
