# I, O widths of a linear layer, R rank
"""A LoRA run's checkpoint: its weights merged into the base's, and the adapter by itself."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from llava_ds.config.arguments import ModelArguments, trained_parts
from llava_ds.export.adapter import write_adapter
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Entry
from llava_ds.model import lora, quantize
from llava_ds.model.open import names as formats

_A, _B = (f".lora_{half}.{lora.ADAPTER}.weight" for half in "AB")


def merged_entries(trained: Iterable[Entry], base: Iterable[Entry], args: ModelArguments) -> list[Entry]:
    """The whole model without LoRA: every weight W + scale * B A, added in float32 and rounded once.

    trained: what a checkpoint holds; base: all that the run began with. After --bits, LoRA is added to what the packed
    weights stand for, beside which it was trained.
    """
    by_name = {entry.name: entry for entry in trained}
    plain = {lora.plain_name(name): entry for name, entry in by_name.items() if not lora.is_lora(name)}
    merged = []
    for entry in base:
        layer = entry.name.removesuffix(".weight")
        if layer + _A in by_name:
            a, b = by_name[layer + _A], by_name[layer + _B]
            read = partial(_merged, entry, a, b, args)
            merged.append(Entry(entry.name, entry.shape, read))
        else:
            own = plain.get(entry.name, entry)
            merged.append(Entry(entry.name, own.shape, own.read))
    return merged


def _merged(weight: Entry, a: Entry, b: Entry, args: ModelArguments) -> torch.Tensor:
    """Entries of W (O, I), A (R, I) and B (O, R) to the merged weight, in W's precision."""
    base = weight.read()
    held = base if args.bits == 16 else quantize.quantize_and_back(base, args)
    scale = args.lora_alpha / args.lora_r
    return torch.addmm(held.float(), b.read().float(), a.read().float(), alpha=scale).to(base.dtype)


def write_restored_adapter(
    export: ExportPlan, trained: Iterable[Entry], base: Iterable[Entry], output_dir: Path
) -> None:
    """Write the folder that the run itself leaves (see export/adapter.py), from what a checkpoint holds.

    base: for a projector that was frozen.
    """
    trained, args = list(trained), export.args
    by_name = {entry.name: entry for entry in base if entry.name.startswith((formats.PROJECTOR, formats.NEWLINE))}
    by_name |= {entry.name: entry for entry in trained}
    adapters = {name: e for name, e in by_name.items() if name.startswith(formats.LANGUAGE_MODEL)}
    wanted = (formats.PROJECTOR, formats.NEWLINE)
    if "vision_tower" in trained_parts(args):
        wanted += (formats.TOWER,)
    beside = {name: e for name, e in by_name.items() if name.startswith(wanted)}
    layers = [name.removeprefix(formats.LANGUAGE_MODEL).removesuffix(_A) for name in adapters if name.endswith(_A)]

    def read(entry: Entry) -> torch.Tensor:
        return entry.read().to(export.dtype).contiguous()

    write_adapter(
        export.model,
        args,
        export.image_options,
        layers,
        {name: read(entry) for name, entry in adapters.items()},
        {name: read(entry) for name, entry in beside.items()},
        output_dir,
    )
