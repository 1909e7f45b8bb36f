"""What a finished run leaves in its folder: a projector, a model or an adapter, the latter two proven on one sample."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from llava_ds.batch import Batch
from llava_ds.checkpoint.saver import can_be_resumed
from llava_ds.config.arguments import Arguments, TrainingArguments, trains_projector_only
from llava_ds.constants import DataError
from llava_ds.data.collate import collate
from llava_ds.data.dataset import EncodedDataset
from llava_ds.engine.gather import full_precision_gathers
from llava_ds.export.adapter import compare_reloaded_adapter, export_adapter
from llava_ds.export.card import write_card
from llava_ds.export.check import compare_reloaded, room_to_compare
from llava_ds.export.plan import Finished
from llava_ds.export.safetensors_shards import num_bytes
from llava_ds.export.write import export_live, export_live_projector, planned_entries
from llava_ds.files.writing import REMEDIES, described
from llava_ds.model.quantize import exact_products
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.tracking.run_record import read_run_record
from llava_ds.tracking.trainer_state import write_trainer_state


def leave_result(
    engine, finished: Finished, form: str, max_shard_bytes: int, args: Arguments, dataset: EncodedDataset, ranks: Ranks
) -> None:
    """Write what the run was for into --output_dir; all ranks call it together.

    engine: that trained; form: "hf", "llava", or "adapter" with LoRA; a run that trains the projector leaves that
    alone. Raises RuntimeError where the reloaded folder does not compute what the trained model does, DataError where
    the disk does not take it.
    """
    output_dir = Path(args.training.output_dir)
    engine.empty_partition_cache()  # after a look at held-out samples, as below
    with _written_or_said(output_dir, args.training):
        if ranks.is_first:
            write_trainer_state(output_dir, args.training.per_device_train_batch_size, args.training.num_train_epochs)
        if trains_projector_only(args.model):
            paths = export_live_projector(finished, engine.module, output_dir, ranks)
            print_first(f"projector: {', '.join(map(str, paths))}")
        elif form == "adapter":
            _leave_adapter(engine, finished, args, dataset, output_dir, ranks)
        else:
            _leave_model(engine, finished, form, max_shard_bytes, args, dataset, output_dir, ranks)


@contextlib.contextmanager
def _written_or_said(output_dir: Path, training: TrainingArguments) -> Iterator[None]:
    """What a disk refuses, as a DataError. The other ranks, which wait for this one, hear of it from the watchdog."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = _refusal(error)
        if cause is None:
            raise
        then = "No checkpoint holds it (--save_strategy no)"
        if can_be_resumed(training):
            then = "Start the same command again: it goes on at its end"
        elif training.save_only_model and training.save_strategy != "no":
            then = "The newest checkpoint holds the same model"
        place = getattr(error, "filename", None) or output_dir
        raise DataError(f"the finished model could not be written: {described(place, cause)}. {then}") from error


def write_model(engine, finished: Finished, form: str, max_shard_bytes: int, ranks: Ranks, folder: Path) -> None:
    """Write the model as it is now into a folder, as leave_result does at the end; all ranks call it together.

    Raises OSError on rank 0 where the disk does not take it, once the other ranks have done their part.
    """
    engine.empty_partition_cache()
    try:
        if trains_projector_only(finished.args):
            export_live_projector(finished, engine.module, folder, ranks)
        elif form == "adapter":
            export_adapter(engine.module, finished.plan, finished.args, finished.image_options, folder, ranks)
        else:
            export_live(finished, engine.module, form, folder, max_shard_bytes, ranks)
    except SafetensorError as error:
        raise _refusal(error) or error from error


def _refusal(error: Exception) -> OSError | None:
    """The disk's refusal, in Python's words; None for any other error."""
    code = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors says it
    cause = OSError(int(code[1]), os.strerror(int(code[1]))) if code else error
    return cause if isinstance(cause, OSError) and cause.errno in REMEDIES else None


def _leave_model(
    engine,
    finished: Finished,
    form: str,
    max_shard_bytes: int,
    args: Arguments,
    dataset: EncodedDataset,
    output_dir: Path,
    ranks: Ranks,
) -> None:
    """The finished model's folder. transformers' is proven on one sample: it has to give the same logits."""
    sample = dataset.example()
    batch = collate([sample], dataset.image_options).to(ranks.device)
    engine.eval()
    with torch.no_grad():
        logits = _logits_everywhere(engine, batch)
    export_live(finished, engine.module, form, output_dir, max_shard_bytes, ranks)
    if not ranks.is_first:
        return
    write_card(output_dir, form, args, output_dir, read_run_record(output_dir)[1])
    if form == "llava":
        print(f"model: {output_dir} (in LLaVA's format)")
    elif problem := room_to_compare(num_bytes(planned_entries(finished), finished.dtype)):
        print(f"model: {output_dir} ({problem})")
    else:
        tower = engine.module.vision_tower
        layouts = [layout for _, layout in sample.media]
        difference = compare_reloaded(output_dir, batch, layouts, tower.mean, tower.std, logits)
        print(f"model: {output_dir} (reloaded with transformers, logits differ by {difference:.1e} of the largest)")


def _leave_adapter(
    engine, finished: Finished, args: Arguments, dataset: EncodedDataset, output_dir: Path, ranks: Ranks
) -> None:
    """The folder of LLaVA and peft, proven on one sample: peft has to compute the same logits from it."""
    batch = collate([dataset.example()], dataset.image_options).to(ranks.device)
    engine.eval()
    with torch.no_grad(), exact_products(engine.module):
        embeds = engine.module.embed(batch)
        logits = _logits_everywhere(engine, batch)
    export_adapter(engine.module, finished.plan, args.model, dataset.image_options, output_dir, ranks)
    if ranks.is_first:
        difference = compare_reloaded_adapter(output_dir, finished.plan, args.model, embeds, logits)
        print(f"adapter: {output_dir} (reloaded with peft, logits differ by {difference:.1e} of the largest)")


def _logits_everywhere(engine, batch: Batch) -> torch.Tensor:
    """(T, V). Not by the engine, which would compute in autocast's precision: it is the weights that are compared."""
    with full_precision_gathers(engine.module):
        logits = engine.module(batch, logits_at=torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device))
    # ZeRO-3 has begun to gather what a backward pass would want next, and that nobody else can gather meanwhile.
    engine.empty_partition_cache()
    return logits
