"""Train a LLaVA: deepspeed run/train.py --deepspeed_config ds_configs/zero3.json

Without --model_name_or_path it trains the tiny model that ships with the package on generated pictures.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llava_ds.runtime.cli import read_training_flags
from llava_ds.runtime.command import begin, leave_with

if __name__ == "__main__":
    begin("run/train.py", reads=read_training_flags)

import deepspeed
import torch
from deepspeed.runtime.utils import set_random_seed

from llava_ds.checkpoint import resume as checkpoint
from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.checkpoint.saver import ModelWriter, Saver, can_be_resumed, what_is_saved
from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.parsing import CHOOSE_DS_CONFIG
from llava_ds.config.shipped import DS_CONFIGS
from llava_ds.data.dataset import open_together
from llava_ds.data.encode import refuse_unfit_tokenizer
from llava_ds.data.file_slices import write_errors
from llava_ds.data.loader import Layout, sample_order, windows
from llava_ds.data.seen_files import changes_since, write_data_files
from llava_ds.data.splits import split_datasets
from llava_ds.data.templates import resolve_template
from llava_ds.engine.activation_budget import choose_layers
from llava_ds.engine.activation_checkpointing import mark_layers
from llava_ds.engine.check import check_engine
from llava_ds.engine.compile import compile_layers
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.compilation import deep_compiles
from llava_ds.engine.ds_config.moments import num_moments
from llava_ds.engine.ds_config.optimizer import kernels_of
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.engine.native_ops import compiling_notes
from llava_ds.engine.param_groups import choose_trainable, describe, parameter_groups
from llava_ds.engine.schedule import total_steps, with_steps_of_epochs
from llava_ds.engine.start import start_engine
from llava_ds.engine.warm_up import heaviest_micro_batch, missing_states, rehearse
from llava_ds.export.finish import leave_result, write_model
from llava_ds.export.plan import Finished, export_format
from llava_ds.export.safetensors_shards import parse_size
from llava_ds.export.trial import try_export
from llava_ds.export.write import planned_entries
from llava_ds.model.attention import attention_report
from llava_ds.model.flops import model_flops
from llava_ds.model.language import length_note
from llava_ds.model.liger import check_liger, use_liger
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.plan import plan_model
from llava_ds.planning import dry_run
from llava_ds.planning.choose import choose_for_ranks
from llava_ds.planning.shapes import shape_of
from llava_ds.planning.this_run import plan_lines, planned_here, tokens_per_micro_batch
from llava_ds.runtime.output_lock import OutputLock
from llava_ds.runtime.ranks import (
    check_same,
    check_shared_folder,
    first_rank_first,
    from_first,
    init_ranks,
    print_first,
    quiet_libraries,
    together,
)
from llava_ds.runtime.stopping import Stopping
from llava_ds.runtime.watchdog import Watchdog
from llava_ds.tiny import default as tiny
from llava_ds.tracking.mending import mend_side_files
from llava_ds.tracking.run_record import write_run_record
from llava_ds.train.evals import Evaluation
from llava_ds.train.hooks import Boundary
from llava_ds.train.loop import TrainState, train
from llava_ds.train.out_of_memory import MemoryWatch, samples_of_step
from llava_ds.train.start_progress import start_progress


def main(argv: list[str]) -> int:
    """Train, and return the exit code: 0, or EXIT_STOPPED or EXIT_NOT_RESUMABLE where it was asked to stop."""
    with (
        OutputLock() as lock,
        Watchdog() as watchdog,  # it and the next tell the other ranks how this one ended
        Stopping(on_leaving=watchdog.leaving) as stop,
    ):
        lock.tell_of(lambda: stop.is_asked)
        return run(argv, lock, watchdog, stop)


def run(argv: list[str], lock: OutputLock, watchdog: Watchdog, stop: Stopping) -> int:
    """The whole of it, from flags to the finished model."""
    args, notes = read_training_flags(argv)
    quiet_libraries(args.training.verbose)
    args, more_notes = take_from_model(args)
    max_shard_bytes = parse_size(args.training.max_shard_size)
    chooses = args.training.deepspeed_config == CHOOSE_DS_CONFIG
    raw_config = {} if chooses else read_ds_config(args.training.deepspeed_config)
    output_dir = Path(args.training.output_dir)
    if not args.training.dry_run:
        lock.take_early(output_dir)
    ranks = init_ranks()
    if not args.training.dry_run:
        lock.take_together(output_dir, ranks)
    watchdog.starts(args.training, ranks)
    same = {**args.same_on_every_rank(), "the DeepSpeed JSON": raw_config}
    check_same(same, ranks, "start every machine with the same flags")
    print_first(*notes, *more_notes)
    if batch_size := from_first(ranks, lambda: checkpoint.kept_batch_size(args, ranks.world_size)):
        args = args.replaced(train_batch_size=batch_size)
    if args.training.use_liger_kernel:
        check_liger(ranks.device)

    # What will be trained on what: all of it is read and checked before a model is built.
    with first_rank_first(ranks):
        args = tiny.fill_in(args)
    args = args.replaced(version=resolve_template(args.model.version))
    plan = plan_model(args.model, args.data.model_max_length)
    if note := length_note(plan.text_config, args.data.model_max_length):
        print_first(note)
    refuse_unfit_tokenizer(args.model, plan.tokenizer)
    image_options = plan.tower.image_options(args)
    form, lines = ("adapter", []) if args.model.lora_enable else export_format(args, plan, image_options)
    print_first(*lines)
    if chooses:
        shape = shape_of(plan.text_config, plan.tower, args)
        raw_config, line = choose_for_ranks(DS_CONFIGS, shape, args, plan.hidden_size, ranks)
        print_first(line)
    asked = args
    resolve = partial(
        resolve_ds_config,
        raw_config,
        world_size=ranks.world_size,
        hidden_size=plan.hidden_size,
        device_type=ranks.device.type,
    )
    # What the data makes no difference to is refused before it is read.
    known_steps = args.training.max_steps if args.training.max_steps > 0 else None
    known = together(ranks, partial(resolve, asked, num_steps=known_steps))
    args = known.args
    dataset = open_together(args, plan.tokenizer, image_options, ranks)
    dataset, held_out, asked_of = split_datasets(args, dataset, plan.tokenizer, image_options, ranks)
    order = sample_order(args, dataset, ranks.world_size)
    tokens = tokens_per_micro_batch(known, plan, dataset, order, ranks)
    flops = model_flops(plan.text_config, plan.tower, args.model)
    layout = Layout.of(args.training, ranks, tokens, flops.pair_cost)
    asked, args = (flags.replaced(tokens_per_micro_batch=tokens) for flags in (asked, args))
    per_epoch = layout.steps_per_epoch(order)
    num_steps = total_steps(args.training, per_epoch)
    args = with_steps_of_epochs(args, per_epoch)
    resolved = together(ranks, partial(resolve, asked, num_steps=num_steps))
    # A compiler that only some machines have decides which Adam is filled in.
    same = {"the resolved optimizer": resolved.config.get("optimizer")}
    check_same(same, ranks, 'write "torch_adam" into optimizer.params, or install the same compilers on every machine')
    identity = checkpoint.RunIdentity.of(args, dataset.fingerprint, ranks.world_size, resolved.config)
    if args.training.save_strategy != "no" and not args.training.dry_run:
        check_shared_folder(output_dir, "--output_dir", ranks)
    # Rank 0 alone reads and hashes what lies there.
    find = partial(checkpoint.find_resume_point, args.training.resume, output_dir, identity)
    about_data = partial(changes_since, dataset.table)
    resume, lines = from_first(ranks, partial(find, args.training.allow_changed_flags, about_data))
    weights = from_first(ranks, lambda: weight_hashes(args, output_dir, resume.path))
    print_first(*plan_lines(resolved, dataset, layout, num_steps, per_epoch), *lines)
    finished, try_whole = Finished(plan, args.model, image_options, resolved.dtype, args.data.model_max_length), None
    if form != "adapter" and not trains_projector_only(args.model):
        entries = planned_entries(finished)
        try_whole = partial(try_export, finished, entries, form, output_dir, max_shard_bytes)
    if args.training.dry_run:
        planned = planned_here(resolved, plan, dataset, order, ranks)
        if try_whole is not None:
            print_first(from_first(ranks, partial(try_whole, dry_run=True)))
        if ranks.is_first:
            print_first(*dry_run.first_batch(dataset, layout, order, resume.step, num_steps, plan.tokenizer))
            print_first(*dry_run.memory(planned, ranks))
            steps, step_s = (resume.step, num_steps), dry_run.measured_step_s(output_dir, resume.step)
            memory = dry_run.memory_of_gpu(ranks), dry_run.memory_of_host()
            print_first(dry_run.conclusion(planned, *memory, steps, layout.batch_size, step_s))
        return 0
    checkpoint.set_aside(output_dir, resume, ranks)
    mend_side_files(output_dir, checkpoint.OF_A_RUN, ranks)
    record = partial(write_run_record, output_dir, args, resolved, num_steps, dataset, held_out, ranks)
    from_first(ranks, partial(_leave, output_dir, record, partial(write_data_files, output_dir, dataset.table)))
    if try_whole is not None:
        print_first(from_first(ranks, try_whole))

    # The model, the engine, and what the engine was in the middle of.
    set_random_seed(args.training.seed)  # Python's and numpy's generators too, which a checkpoint holds
    torch.backends.cuda.matmul.allow_tf32 = args.training.tf32
    model = build_model(plan, args.model, resolved.config, resolved.dtype, args.training.seed, ranks)
    print_first(attention_report(plan.text_config, ranks.device, resolved.compute_dtype), plan.last_layer_note())
    if args.training.use_liger_kernel:
        print_first(*use_liger(model.language_model, plan.text_config, ranks.device, resolved.dtype))
    choose_trainable(model, args)
    recomputed, lines = mark_layers(model, args, resolved.config)
    print_first(*lines)
    groups = parameter_groups(model, args, resolved.config.get("optimizer"))
    print_first(*describe(model, groups))
    print_first(*compiling_notes(list(kernels_of(resolved.config))))
    engine = start_engine(model, groups, resolved, num_steps, ranks.device)
    check_engine(engine, resolved)
    if resume.path is not None:
        print_first(checkpoint.restore(engine, resume, ranks, args.training.seed))
    state = TrainState(resume.step)
    moments, budget = num_moments(resolved.config), args.training.activation_memory_gb
    watchdog.knows(partial(samples_of_step, dataset, layout, order))
    watch = MemoryWatch(engine, resolved, dataset, layout, order, state, ranks)
    heaviest, chooses_layers = None, args.training.gradient_checkpointing == "auto"
    if state.step < num_steps and (ranks.device.type == "cuda" or chooses_layers):
        heaviest = heaviest_micro_batch(dataset, layout, order, state.step, num_steps, ranks.device)
    if heaviest and chooses_layers:
        with watch.rehearsal(heaviest):
            print_first(*choose_layers(engine, heaviest, recomputed, moments, budget, ranks))
    if deep_compiles(resolved.config):
        engine.compile()
    elif args.training.torch_compile:
        count = compile_layers(model, args.training.torch_compile_backend)
        print_first(f"{count} layers are compiled when they first run")
    if heaviest:
        with watch.rehearsal(heaviest):
            rehearse(engine, heaviest, missing_states(engine, moments))
        del heaviest

    # Train.
    progress, evals = start_progress(
        args, engine, resolved, dataset, layout, order, flops, resume_step=resume.step, num_steps=num_steps, ranks=ranks
    )
    evaluation = Evaluation(engine, args, held_out, asked_of, layout, plan.tokenizer, evals, ranks, num_steps=num_steps)
    model_writer = None
    if args.training.save_only_model:
        write = partial(write_model, engine, finished, form, max_shard_bytes, ranks)
        model_writer = ModelWriter("projector" if trains_projector_only(args.model) else form, write)
    saver = Saver(engine, output_dir, identity, weights, args.training, resume.path, ranks, model_writer)
    boundary = Boundary(
        engine, model, state, num_steps, args.training, stop, watchdog, progress, evaluation, saver, ranks
    )
    steps = windows(
        dataset,
        layout,
        order,
        start_step=state.step,
        num_steps=num_steps,
        num_workers=args.data.dataloader_num_workers,
        device=ranks.device,
    )
    with watch:
        boundary.begin()
    with watch, stop.training(args.training.max_run_time, ranks):
        reduction, num_sources = args.training.loss_reduction, len(dataset.sources)
        train(engine, steps, state, num_steps, reduction, num_sources, ranks, boundary.after_step)
    watchdog.enters("export", state.step)
    progress.close()
    if state.stops:
        progress.trackers.close()
        return stop.leave(state.step, what_is_saved(args.training), can_be_resumed(args.training), ranks)
    stop.ends(can_be_resumed(args.training))
    if resolved.config.get("comms_logger", {}).get("enabled"):
        deepspeed.comm.log_summary()

    leave_result(engine, finished, form, max_shard_bytes, args, dataset, ranks)
    progress.trackers.close()
    return 0


def _leave(output_dir: Path, *writes: Callable[[], None]) -> None:
    """Write what says what is run. Raises ConfigError where a file can't be written."""
    with write_errors(output_dir, "what the run is", "--output_dir"):
        for write in writes:
            write()


def train_and_leave_group(argv: list[str]) -> int:
    """Train, and leave the process group."""
    code = main(argv)
    torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    leave_with(partial(train_and_leave_group, sys.argv[1:]), "run/train.py")
