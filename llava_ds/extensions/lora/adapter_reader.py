"""Open a LoRA adapter's folder as a complete model: the base model with the adapter merged."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.lora.merged_adapters import Adapter, Merged, read_adapter
from llava_ds.files.model_files import BESIDE_ADAPTER, is_adapter, is_there, own_file
from llava_ds.model.families.language import is_llava_type, trunk_name
from llava_ds.model.open import names as formats
from llava_ds.model.open.folder import read_folder
from llava_ds.model.open.model_folder import FLAG, ModelFolder, read_model_config, without_prefix
from llava_ds.model.open.trained_folder import flags_of_llava, tower_in_config
from llava_ds.model.open.weights import Over, Overlaid, Source, WeightFiles, Weights


def open_adapter(path: str, model_base: str | None) -> ModelFolder:
    """Open a LoRA adapter, LLaVA's or peft's, over the model that it was trained on."""
    adapter = read_adapter(path)
    base_path = model_base or adapter.base
    if base_path is None or not Path(base_path).is_dir():
        raise ConfigError(
            f"{FLAG} {path} is a LoRA adapter of {base_path}, but that folder is not on this machine: give it by "
            "--model_base"
        )
    if is_adapter(base_path):
        raise ConfigError(f"--model_base {base_path} is an adapter itself: merge it, and give the folder of the result")
    base = read_folder(base_path)
    config = read_model_config(path) if (Path(path) / "config.json").is_file() else {}
    is_llava = is_llava_type(config.get("model_type")) and "text_config" not in config
    renames = _renames_of_adapter(base, is_llava)
    beside = Path(path) / BESIDE_ADAPTER
    if is_there(beside):
        own_file(beside)
    sources = {}
    for part, rename in renames.items():
        source: Source | None = getattr(base, part)
        over = Source(FLAG, str(beside), without_prefix(rename)) if beside.is_file() else None
        if over is not None and not over.files().shapes:
            over = None
        merge = Over(Merged, adapter=adapter, rename=rename)
        if source is None:
            sources[part] = over if over is None else dataclasses.replace(over, changes=(merge,))
            continue
        changes = list(source.changes)
        if over is not None:  # tensors in a separate file are stored without LoRA, though their layers may have it
            changes.append(Over(_overlay, over, is_tower=part == "vision_tower"))
        sources[part] = dataclasses.replace(source, changes=(*changes, merge))
    # The tower of a composed LLaVA is in its own folder, and the adapter may contain LoRA for it.
    merges_tower = Over(Merged, adapter=adapter, rename=renames["vision_tower"])
    if is_llava and sources["projector"] is None:
        raise DataError(f"{path} is LoRA of a LLaVA, but has no {BESIDE_ADAPTER} with its projector: copy it again")
    _refuse_unknown_tensors(adapter, beside, renames.values())
    has_tokenizer = any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return dataclasses.replace(
        base,
        path=path,
        kind=f"a LoRA adapter over {base.kind}",
        flags=flags_of_llava(config) if is_llava else base.flags,
        tokenizer=path if has_tokenizer else base.tokenizer,
        trained_with=tower_in_config(path, config) if is_llava else base.trained_with,
        base=str(base_path),
        tower_changes=(merges_tower,),
        **sources,
    )


def _renames_of_adapter(base: ModelFolder, is_llava: bool) -> dict[str, Callable[[str], str | None]]:
    """For each part, return a function from an adapter's tensor names (without peft's prefix) to the part's names."""
    renames: dict[str, Callable[[str], str | None]]
    if is_llava or base.projector is None or base.vision_config is None:
        from_llava = partial(formats.language_model_from_llava, trunk=trunk_name(base.text_config))
        renames = {
            "language_model": from_llava,
            "projector": formats.projector_from_llava,
            "vision_tower": formats.tower_from_llava,
        }
    else:
        renames = {
            "language_model": base.language_model.rename,
            "projector": base.projector.rename,
            "vision_tower": base.vision_tower.rename,
        }
    renames["newline"] = formats.newline_from_llava
    return renames


def _overlay(over: Source, below: Weights, is_tower: bool) -> Overlaid:
    """Overlay tensors from LLaVA's files. They hold the whole tower, but only the layers that run are used."""
    return Overlaid(below, over.open(below.shapes.__contains__) if is_tower else over.open())


def _refuse_unknown_tensors(adapter: Adapter, beside: Path, renames) -> None:
    """Raise DataError for tensors in an adapter's files that belong to no part of the model."""
    for file in filter(Path.is_file, (adapter.file, beside)):
        for name in WeightFiles(file).shapes:
            layer, lora, _ = name.partition(".lora_")
            plain = formats.plain_name(adapter.changed_weight(layer) if lora else name)
            if all(rename(plain) is None for rename in renames):
                raise DataError(f"{file} contains {name}, but no part of the model has it")
