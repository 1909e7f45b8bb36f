"""The training session (model, engine, saver, log, watchdog), and the functions that build and finish it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import deepspeed

from llava_ds.checkpoint.resume import RUN_FILES, set_aside
from llava_ds.checkpoint.saver import ModelWriter, Saver, can_be_resumed, describe_saving
from llava_ds.data.file_slices import write_errors
from llava_ds.data.loader import Window, windows
from llava_ds.data.seen_files import write_data_files
from llava_ds.engine.construct import build_model
from llava_ds.engine.ds_config.activation import deep_compiles
from llava_ds.engine.ds_config.optimizer import kernels_of, num_moments
from llava_ds.engine.param_groups import choose_trainable, describe_parts, parameter_groups
from llava_ds.engine.runner import Direct, Runner
from llava_ds.engine.start import check_engine, seed_everything, start_engine
from llava_ds.extensions.active import choice, plugins
from llava_ds.extensions.base import EvalMeasure, Hook, Measure, Phase, SessionPart
from llava_ds.model.attention import attention_report
from llava_ds.model.heads import Head
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_details, print_first
from llava_ds.runtime.stopping import Stopping
from llava_ds.runtime.watchdog import Watchdog
from llava_ds.tracking.mending import mend_side_files
from llava_ds.tracking.out_of_memory import MemoryWatch, name_rank_samples
from llava_ds.tracking.run_record import write_run_record
from llava_ds.tracking.trackers import Trackers, open_trackers
from llava_ds.train.objectives.objective import SFT, Objective
from llava_ds.train.plan import Plan
from llava_ds.train.start import Start
from llava_ds.train.state import TrainState

if TYPE_CHECKING:
    from llava_ds.engine.warm_up import NewEngine
    from llava_ds.train.evaluating.evals import Evaluation


@dataclass(frozen=True)
class Session:
    """The objects of a running training. trackers: those of --report_to; evaluation: None if nothing is evaluated;
    memory: explains out-of-memory errors; parts: the extensions' parts of the session."""

    plan: Plan
    ranks: Ranks
    mesh: Mesh
    model: LlavaModel
    engine: deepspeed.DeepSpeedEngine
    runner: Runner
    objective: Objective
    state: TrainState
    trackers: Trackers
    evaluation: "Evaluation | None"
    saver: Saver
    memory: MemoryWatch
    watchdog: Watchdog
    stop: Stopping
    parts: Sequence[SessionPart] = ()

    def windows(self) -> Iterator[Window]:
        """Yield this rank's micro-batches of every remaining step."""
        plan, done = self.plan, self.state.step
        workers = plan.args.data.dataloader_num_workers
        found = windows(plan.steps, self.mesh, done=done, num_workers=workers, device=self.ranks.device)
        for part in self.parts:
            found = part.windows(self.engine, done, found)
        return found

    def saves_at(self, step: int, last: bool) -> bool:
        """True if a checkpoint is due after a step. last: True if it is the run's last step."""
        training = self.plan.args.training
        return training.save_strategy != "no" and (last or step % training.save_steps == 0)


def build(plan: Plan, started: Start, watchdog: Watchdog, stop: Stopping) -> Session:
    """Build model and engine, restore the checkpoint, and try the largest micro-batch. Collective.

    Raises ConfigError if the export can't be written, a parameter group would not be trained as configured, or the
    largest micro-batch runs out of memory.
    """
    ranks, mesh = started.ranks, started.mesh
    _prepare_output(plan, ranks)
    training, resolved, point = plan.args.training, plan.resolved, plan.resume.point
    seed_everything(training.seed)  # also seeds Python's and numpy's generators, because checkpoints contain them
    parts = plan.active.parts(plan, started)
    model, engine, checkpointed, measures = _build_engine(plan, started, parts)
    plain = SFT(training.loss_reduction, len(plan.steps.dataset.sources), grad_ranks=mesh.grad_ranks)
    objective = plan.active.objective(plan, mesh, plain)
    runner = _runner(engine, mesh)
    for part in parts:
        part.started(runner)
    if point.path is not None:
        from llava_ds.checkpoint.training_state import restore

        print_first(restore(engine, point, ranks, training.seed))
    state = TrainState(point.step)
    watchdog.set_samples(partial(name_rank_samples, plan.steps))
    memory = MemoryWatch(engine, resolved, plan.steps, lambda: state.step, ranks)
    _warm_up(plan, model, runner, objective.probe, checkpointed, memory, started)
    trackers = open_trackers(plan.args, plan.run_folder, point.step, plan.steps.num_steps, ranks)
    evaluation = _evaluation(plan, runner, objective, measures, trackers, started)
    for part in parts:
        objective = part.training_objective(objective)
    if plugins() and training.check_plugin:
        print_first(*choice("check_plugin", True)(plan, runner, objective, ranks, mesh))
    saver = _saver(plan, engine, ranks)
    return Session(
        plan,
        ranks,
        mesh,
        model,
        engine,
        runner,
        objective,
        state,
        trackers,
        evaluation,
        saver,
        memory,
        watchdog,
        stop,
        parts,
    )


def _evaluation(
    plan: Plan, runner: Runner, objective: Objective, measures: list[Measure], trackers: Trackers, started: Start
) -> "Evaluation | None":
    """Make the run's evaluation, or return None. A resumed run needs it to drop log entries after its checkpoint."""
    evaluates = plan.args.evaluates or any(phase == Phase.EVALUATE for phase, _ in plan.active.hooks)
    if not evaluates and plan.resume.point.path is None:
        return None
    from llava_ds.train.evaluating.evals import Evaluation

    return Evaluation(runner, plan, objective, measures, trackers, started.ranks, started.mesh)


def _runner(engine: deepspeed.DeepSpeedEngine, mesh: Mesh) -> Runner:
    """Choose the runner of micro-batches for this mesh."""
    makes = [part.runner for part in mesh.parts if part.runner is not None]
    return makes[0](engine) if makes else Direct(engine)


def finish(session: Session, hooks: Sequence[Hook]) -> int:
    """Export the model, or leave early after a stop request. Returns the exit code."""
    plan, ranks, training = session.plan, session.ranks, session.plan.args.training
    if session.state.stops:
        session.trackers.close()
        return session.stop.leave(session.state.step, describe_saving(training), can_be_resumed(training), ranks)
    session.stop.end(can_be_resumed(training))
    if plan.resolved.config.get("comms_logger", {}).get("enabled"):
        deepspeed.comm.log_summary()
    from llava_ds.export.final_export import export_model

    steps = [hook.before_export() for hook in hooks]
    step = next((step for step in steps if step is not None), None)
    export_model(session.runner, plan.export, plan.args, plan.steps.dataset, ranks, step)
    for hook in hooks:
        hook.after_export()
    session.trackers.close()
    return 0


def _prepare_output(plan: Plan, ranks: Ranks) -> None:
    """Move an earlier run's files in --output_dir aside, repair logs, write run.json, and try the export."""
    output_dir = plan.output_dir
    set_aside(output_dir, plan.resume.point, ranks)
    mend_side_files(output_dir, RUN_FILES, ranks)

    def record() -> None:
        with write_errors(output_dir, "the record of the run", "--output_dir"):
            write_run_record(
                output_dir,
                plan.args,
                plan.resolved,
                plan.steps.num_steps,
                plan.steps.dataset,
                plan.evals.eval_set,
                ranks,
            )
            if plan.steps.dataset.is_whole:
                write_data_files(plan.run_folder, plan.steps.dataset.table)

    broadcast_from_first(ranks, record)
    if plan.export.is_whole_model:
        from llava_ds.export.trial import try_export

        print_details(broadcast_from_first(ranks, partial(try_export, plan.export, output_dir)))


def _build_engine(
    plan: Plan, started: Start, parts: Sequence[SessionPart]
) -> tuple[LlavaModel, deepspeed.DeepSpeedEngine, dict, list[Measure]]:
    """Build the model and its engine. Returns (model, engine, the model parts with layers to checkpoint by name, the
    extensions' measures for evaluations)."""
    args, resolved, text_config, ranks = plan.args, plan.resolved, plan.model.text_config, started.ranks
    seed, mesh = args.training.seed, started.mesh
    model_plan, point = plan.model, plan.resume.point.path
    if point is not None:
        model_plan = replace(model_plan, checkpoint=point)
    model = build_model(model_plan, args.model, resolved.config, resolved.dtype, seed, ranks, mesh)
    computed = text_config, ranks.device, resolved.compute_dtype
    own = [] if plan.model.architecture is None else plan.model.architecture.layer_notes(*computed)
    say = print_details if ranks.device.type == "cpu" else print_first  # on a GPU, make a slow kernel visible
    say(attention_report(*computed), *own)
    print_details(plan.model.last_layer_note())
    print_first(*plan.active.kernels(model, plan.model, resolved, ranks))
    mesh.adapt(model)
    choose_trainable(model, args)
    measures = [own.create(model) for own in plan.own.values() if isinstance(own, EvalMeasure)]
    for part in parts:
        part.built(model)
    checkpointed, lines = {}, []
    if args.training.gradient_checkpointing != "off":
        from llava_ds.engine.activation_checkpointing import mark_checkpointed_layers

        checkpointed, lines = mark_checkpointed_layers(model, args, resolved.config)
    print_first(*lines)
    groups = parameter_groups(model, args, resolved.config.get("optimizer"))
    print_first(*describe_parts(model, groups))
    if kernels := kernels_of(resolved.config):
        from llava_ds.engine.ds_config.native_ops import compiling_notes

        print_first(*compiling_notes(list(kernels)))
    num_updates = plan.steps.num_steps * math.prod(part.updates for part in parts)
    engine = start_engine(model, groups, resolved, num_updates, mesh)
    check_engine(engine, resolved, mesh)
    return model, engine, checkpointed, measures


def _warm_up(
    plan: Plan, model: LlavaModel, runner: Runner, probe: Head, checkpointed: dict, memory: MemoryWatch, started: Start
) -> None:
    """Let extensions act on the new engine, compile it if DeepCompile is on, and try the largest micro-batch."""
    how, new = plan.args.training.gradient_checkpointing, None
    if plan.active.wraps or how == "auto" or started.ranks.device.type == "cuda":
        new = _new_engine(plan, model, runner, probe, checkpointed, memory, started)
        if how == "auto":
            print_first(*choice("gradient_checkpointing", how)(new))
        print_first(*plan.active.started(new))
    if deep_compiles(plan.resolved.config):
        runner.engine.compile()
    if new is not None:
        new.warm_up()


def _new_engine(
    plan: Plan, model: LlavaModel, runner: Runner, probe: Head, checkpointed: dict, memory: MemoryWatch, started: Start
) -> "NewEngine":
    from llava_ds.engine.warm_up import LargestMicroBatch, NewEngine, largest_micro_batch

    ranks, done = started.ranks, plan.resumed_step
    moments = num_moments(plan.resolved.config) + plan.args.extra_moments

    def find() -> LargestMicroBatch | None:
        is_left = done < plan.steps.num_steps
        return largest_micro_batch(plan.steps, done, probe, ranks, started.mesh) if is_left else None

    return NewEngine(plan.resolved, model, runner, checkpointed, moments, ranks, memory.warm_up, find)


def _saver(plan: Plan, engine, ranks: Ranks) -> Saver:
    training, model_writer = plan.args.training, None
    if training.save_only_model:
        from llava_ds.export.final_export import write_model

        model_writer = ModelWriter(plan.export.form, partial(write_model, engine, plan.export, ranks))
    saver = Saver(engine, training, plan.resume, ranks, model_writer)
    saver.states = plan.active.states
    return saver
