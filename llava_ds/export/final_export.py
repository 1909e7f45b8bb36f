"""Export a finished run's model, adapter or projector. Models and adapters are reloaded and compared on one sample."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from llava_ds.batch import Batch
from llava_ds.checkpoint.saver import can_be_resumed
from llava_ds.config.arguments import Arguments, TrainingArguments
from llava_ds.constants import DataError
from llava_ds.data.collate import collate
from llava_ds.data.dataset import EncodedDataset
from llava_ds.engine.placement import full_precision_gathers
from llava_ds.engine.runner import Runner
from llava_ds.export.bit_check import Written, check_written
from llava_ds.export.card import write_card
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.layer_by_layer import NotCompared
from llava_ds.export.output_folder import write_live_folder
from llava_ds.export.reload_check import Base, compare_reloaded, compared_positions, describe_bits, describe_comparison
from llava_ds.extensions.active import text_part
from llava_ds.files.writing import REMEDIES, described
from llava_ds.model.heads import Logits
from llava_ds.model.open.names import PROJECTOR_FILES
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.tf32 import exact_fp32
from llava_ds.tracking.metric_copies import write_trainer_state
from llava_ds.tracking.run_record import read_run_record


def export_model(
    runner: Runner,
    export: ExportPlan,
    args: Arguments,
    dataset: EncodedDataset,
    ranks: Ranks,
    step: int | None = None,
) -> None:
    """Export the finished model into --output_dir. Collective.

    step: the model's step, if it is not the last. Raises RuntimeError if the reloaded folder does not reproduce the
    trained model's logits, and DataError if a file can't be written.
    """
    output_dir = Path(args.training.output_dir)
    runner.engine.empty_partition_cache()  # the eval loss may have gathered parameters (see _logits_everywhere)
    # Eager, because compiled layers would be compiled again for a single forward without gradients.
    with _disk_errors(output_dir, args.training), exact_fp32(), torch.compiler.set_stance("force_eager"):
        if ranks.is_first:
            write_trainer_state(output_dir, args.training.per_device_train_batch_size, args.training.num_train_epochs)
        if export.is_whole_model or export.form == "adapter":
            _export_folder(runner, export, args, dataset, ranks, step)
            return
        written = write_live_folder(export, runner.engine.module, output_dir, ranks)
        if ranks.is_first:
            from llava_ds.export.reload_llava import check_projector

            files = ", ".join(str(output_dir / name) for name in PROJECTOR_FILES)
            check = partial(check_projector, export, written)
            print(f"projector: {files} ({describe_bits(args.training.check_export, check)})")


@contextlib.contextmanager
def _disk_errors(output_dir: Path, training: TrainingArguments) -> Iterator[None]:
    """Turn errors of the disk into DataError. The other ranks wait meanwhile; the watchdog informs them."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = _refusal(error)
        if cause is None:
            raise
        then = "It is not in any checkpoint (--save_strategy no)"
        if can_be_resumed(training):
            then = "Start the same command again: it resumes at the last step"
        elif training.save_only_model and training.save_strategy != "no":
            then = "The newest checkpoint holds the same model"
        place = getattr(error, "filename", None) or output_dir
        raise DataError(f"the finished model could not be written: {described(place, cause)}. {then}") from error


def write_model(engine, export: ExportPlan, ranks: Ranks, folder: Path) -> None:
    """Write the current model into a folder, in its export format. Collective.

    Raises OSError on rank 0 if a file can't be written, after the other ranks have finished their reads.
    """
    engine.empty_partition_cache()
    try:
        _write(engine, export, folder, ranks)
    except SafetensorError as error:
        raise _refusal(error) or error from error


def export_to_subfolder(name: str, engine, export: ExportPlan, training: TrainingArguments, ranks: Ranks) -> Path:
    """Write the current model into the folder `name` in --output_dir, and return the folder's path. Collective.

    Raises DataError if a file can't be written.
    """
    folder = Path(training.output_dir) / name
    with _disk_errors(folder, training):
        if ranks.is_first:
            folder.mkdir(exist_ok=True)
        write_model(engine, export, ranks, folder)
    return folder


def _refusal(error: Exception) -> OSError | None:
    """Return the OSError of a disk in a file or safetensors error; None for any other error."""
    code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors' wording
    cause = OSError(int(code[1]), os.strerror(int(code[1]))) if code else error
    return cause if isinstance(cause, OSError) and cause.errno in REMEDIES else None


def _write(engine, export: ExportPlan, folder: Path, ranks: Ranks) -> Written:
    if export.form == "adapter":
        return export.adapter.write(export, engine.module, folder, ranks)
    return write_live_folder(export, engine.module, folder, ranks)


def _export_folder(
    runner: Runner,
    export: ExportPlan,
    args: Arguments,
    dataset: EncodedDataset,
    ranks: Ranks,
    step: int | None,
) -> None:
    """Write a model's or adapter's folder, reload it, and compare its logits with the trained model's on one sample."""
    output_dir, sample, check = Path(args.training.output_dir), dataset.example(), args.training.check_export
    batch, logits = collate([sample], dataset.image_options).to(ranks.device), None
    if check != "off":
        exact = export.adapter.exact(runner.engine.module) if export.adapter else contextlib.nullcontext()
        with exact:
            logits = _logits_everywhere(runner, batch, check)
    written = _write(runner.engine, export, output_dir, ranks)
    if not ranks.is_first:
        return
    if export.is_whole_model:
        write_card(output_dir, export.form, args, output_dir, read_run_record(output_dir)[1], step)
    tower, layouts = runner.engine.module.vision_tower, [layout for _, layout in sample.media]
    what, form, library = "model", "", "transformers"
    compare = partial(compare_reloaded, output_dir, batch, layouts, tower.mean, tower.std, logits)
    if export.form == "llava":
        from llava_ds.export.reload_llava import compare_reloaded_llava

        form, library = "in LLaVA's format, ", "llava_ds"
        compare = partial(compare_reloaded_llava, output_dir, export, batch, logits)
    elif export.form == "adapter":
        what, library = "adapter", "peft"
        if export.model.architecture is None:
            compare = partial(export.adapter.compare, output_dir, export, batch, logits)
        else:
            compare = partial(compare, base=Base(export.source_folder, partial(export.adapter.hold, export)))
    text = export.model.text_config
    own = (flags.differs for flags in args.own.values() if flags.differs)
    if export.is_whole_model and (why := text_part(text).differs(text, export.dtype) or next(own, "")):
        compare = partial(_refuse_to_compare, why)
    compare = partial(_compare_both, written, compare)
    print(f"{what}: {output_dir} ({form}{describe_comparison(check, batch.input_ids.shape[1], library, compare)})")


def _compare_both(written: Written, compare: Callable[[], float]) -> float:
    """Check the bits of all written tensors, then compare logits. Returns the difference of the logits."""
    check_written(written)
    return compare()


def _refuse_to_compare(why: str) -> float:
    raise NotCompared(why)


@torch.no_grad()
def _logits_everywhere(runner: Runner, batch: Batch, check: str) -> torch.Tensor:
    """Return logits (T, V) of the compared positions, on every rank. Bypasses the engine: it would use autocast."""
    engine = runner.engine
    engine.eval()
    with full_precision_gathers(engine.module):
        positions = compared_positions(check, batch.input_ids.shape[1], batch.input_ids.device)
        logits = runner.forward(engine.module, batch, lambda model, batch: model(batch, Logits(positions)))
        if logits is None:  # None: another rank has the logits
            rows, dtype = engine.module.language_model.config.vocab_size, next(engine.module.parameters()).dtype
            logits = torch.empty(len(positions), rows, dtype=dtype, device=positions.device)
        logits = runner.agree(logits)
    # ZeRO-3 has gathered parameters for a backward pass that won't come. Release them, or nothing else can gather them.
    engine.empty_partition_cache()
    return logits
