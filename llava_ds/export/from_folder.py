"""Read a finished model from a folder in LLaVA's or transformers' format, or from a LoRA over one."""

from pathlib import Path

import torch

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import ConfigError
from llava_ds.data.templates import resolve_template
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.safetensors_shards import DTYPES
from llava_ds.export.tensors import Entry, read_entries
from llava_ds.files.model_files import read_config, shown
from llava_ds.files.processor_files import processor_template
from llava_ds.model.open.folder import read_folder, take_from_model
from llava_ds.model.open.model_folder import FLAG
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.names import value_head_file

DEFAULT_LENGTH = 2048  # LLaVA-1.5's
# Fields of config.json that only an export reads.
EXPORT_FIELDS = {
    "tokenizer_model_max_length": ((int, float), "a number of tokens"),
    "llava_ds_chat_template": (str, "a text"),
    "llava_ds_vocab_size": (int, "a number of rows"),
    "mm_vision_tower": (str, "a name"),
}
NO_LIMIT = 10**9  # tokenizers without a limit have a larger model_max_length


def open_folder(
    source: Path, given: dict[str, object], dtype: torch.dtype | None, form: str
) -> tuple[ExportPlan, list[Entry], list[str]]:
    """Return the export plan of the model in a folder, its tensors, and lines that describe it.

    given: flags of run/export.py that complete the folder (vision_tower, model_base, version); dtype: None for the
    folder's dtype; form: format of the export. Raises ConfigError or DataError if the folder has no complete LLaVA.
    """
    given = dict(given)
    base = given.get("model_base")
    folder = read_folder(str(source), base)
    config = _config_of(source, folder.base)
    if folder.projector is None:
        raise ConfigError(f"{source} is {folder.kind}: expected a checkpoint, or the folder of a complete LLaVA")
    tower_name = given.get("vision_tower") or config.get("mm_vision_tower")
    if folder.vision_config is not None:
        given.pop("vision_tower", None)  # the folder includes its own tower; only the name is used
        if form == "llava" and tower_name is None:
            raise ConfigError(
                "--vision_tower is missing: LLaVA's loader needs the tower's name: give its name or folder"
            )
    model = ModelArguments(model_name_or_path=str(source), **given)
    args = Arguments(model, DataArguments(), TrainingArguments(), frozenset(given))
    args, lines = take_from_model(args)
    args = args.replaced(version=resolve_template(args.model.version))
    plan = plan_model(args.model, 1, value_head_file(source) is not None)
    length = config.get("tokenizer_model_max_length") or plan.tokenizer.model_max_length
    template = None
    if "version" not in given and "llava_ds_version" not in config:
        is_hf = folder.vision_config is not None
        template = config.get("llava_ds_chat_template") or (processor_template(source, str(source)) if is_hf else None)
    rows = None if args.model.resize_token_embeddings else config.get("llava_ds_vocab_size")
    parts = {
        "vision_tower": plan.sources.whole_tower(),
        "projector": plan.sources.projector.open(),
        "language_model": plan.sources.language_model.open(),
    }
    if plan.sources.newline is not None and "unpad" in args.model.mm_patch_merge_type:
        parts["newline"] = plan.sources.newline.open()
    if plan.has_value_head:
        parts["value_head"] = plan.sources.value_head.open()
    parts |= {part: source.open() for part, source in plan.sources.own.items()}
    entries = [entry for part, weights in parts.items() for entry in read_entries(part, weights)]
    export = ExportPlan(
        plan,
        args.model,
        plan.tower.image_options(args),
        dtype or _precision(entries),
        DEFAULT_LENGTH if length > NO_LIMIT and form == "llava" else length,
        form,
        rows=rows if rows != plan.text_config.vocab_size else None,
        tower_name=tower_name,
        template=template,
    )
    return export, entries, lines


def _config_of(source: Path, base: str | None) -> dict:
    """Return config.json of a folder or, if it is an adapter without one, of its base model; {} without any."""
    for folder in (source, *([] if base is None else [Path(base)])):
        if (folder / "config.json").is_file():
            config = read_config(folder / "config.json", f"{FLAG} {folder}")
            for name, (kind, what) in EXPORT_FIELDS.items():
                value = config.get(name)
                if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                    raise ConfigError(f"{FLAG} {folder}: config.json has {name} {shown(value)}, expected {what}")
            return config
    return {}


def _precision(entries: list[Entry]) -> torch.dtype:
    """Return the dtype of the language model's first matrix. Raises ConfigError if it can't be written."""
    first = next(entry for entry in entries if entry.name.startswith("language_model.") and len(entry.shape) > 1)
    dtype = first.read().dtype
    if dtype not in DTYPES:
        raise ConfigError(f"{first.name} is {dtype} and can't be written: give --dtype")
    return dtype
