"""Plan a run: read and check everything before a model is built."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from llava_ds.checkpoint.base_weights import weight_hashes
from llava_ds.checkpoint.resume import ResumePlan, find_resume_point
from llava_ds.checkpoint.run_identity import RunIdentity
from llava_ds.config.arguments import Arguments, rate_note
from llava_ds.config.bounds import parse_size
from llava_ds.config.properties import clashes, features
from llava_ds.config.rules import CHOOSE_DS_CONFIG
from llava_ds.constants import ConfigError
from llava_ds.data.dataset import EncodedDataset, open_together
from llava_ds.data.end_markers import refuse_unfit_tokenizer
from llava_ds.data.splits import split_datasets
from llava_ds.data.step_plan import (
    Packing,
    StepPlan,
    sample_order,
    steps_per_epoch,
    total_steps,
    with_steps_of_epochs,
)
from llava_ds.data.templates import resolve_template
from llava_ds.engine.ds_config.parallel import check_model
from llava_ds.engine.ds_config.resolve import ResolvedConfig, resolve_ds_config
from llava_ds.engine.ds_config.scheduler import describe_schedule
from llava_ds.export.export_plan import ExportPlan, export_format
from llava_ds.extensions.active import Active, active, choice
from llava_ds.files.writing import run_folder
from llava_ds.geometry import ImageOptions
from llava_ds.model.families.language import length_note
from llava_ds.model.open.model_plan import ModelPlan, plan_model
from llava_ds.runtime.ranks import (
    Ranks,
    broadcast_from_first,
    check_same,
    check_shared_folder,
    first_rank_first,
    on_every_rank,
    print_details,
    print_first,
)
from llava_ds.tiny import default as tiny
from llava_ds.tracking.flops import ModelFlops, model_flops
from llava_ds.train.start import Start

FEW_STEPS = 40  # with fewer steps a run has hardly left its warm-up


@dataclass(frozen=True)
class EvalSets:
    """Data sets other than the training set. eval_set: held-out samples for the eval loss, or None; own: the
    extensions' data sets, by extension name."""

    eval_set: EncodedDataset | None
    own: Mapping[str, EncodedDataset]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a model is built. args: the flags, with every "auto" replaced by a value; own:
    the extensions' plans, by extension name."""

    args: Arguments
    resolved: ResolvedConfig
    model: ModelPlan
    images: ImageOptions
    flops: ModelFlops
    steps: StepPlan
    evals: EvalSets
    resume: ResumePlan
    export: ExportPlan
    own: Mapping[str, object] = field(default_factory=dict)

    @property
    def active(self) -> Active:
        """The extensions of the run."""
        return active(self.args.own, self.model.text_config)

    def completed(self, ranks: Ranks) -> "Plan":
        """Let the extensions complete their plans, and return the plan with them. Collective.

        Raises ConfigError and DataError on every rank.
        """
        plan = self
        for name, extension in self.active.extensions.items():
            if extension.complete is not None:
                plan = dataclasses.replace(plan, own={**plan.own, name: extension.complete(plan, ranks)})
        return plan

    @property
    def output_dir(self) -> Path:
        """The folder of --output_dir."""
        return Path(self.args.training.output_dir)

    @property
    def run_folder(self) -> Path:
        """The folder of the run's own files, in output_dir."""
        return run_folder(self.output_dir)

    @property
    def data_sets(self) -> list[EncodedDataset]:
        """The training data, followed by the eval set if the run has one."""
        return [self.steps.dataset, *([self.evals.eval_set] if self.evals.eval_set else [])]

    @property
    def resumed_step(self) -> int:
        """Number of optimizer steps already done."""
        return self.resume.point.step

    def describe(self) -> list[str]:
        """Return lines that describe the data and the optimizer steps."""
        training, steps = self.args.training, self.steps
        epochs, size = steps.num_steps / steps.steps_per_epoch, steps.samples_per_step
        schedule = describe_schedule(training, steps.num_steps, self.resolved.config.get("scheduler"))
        return [
            *steps.dataset.counts(),
            *steps.dataset.notes(),
            f"{steps.num_steps:,} optimizer steps of {size} samples ({epochs:.2f} epochs), {schedule}",
            *self._few_steps(),
            *rate_note(self.args),
            f"output: {training.output_dir}",
        ]

    def _few_steps(self) -> list[str]:
        """Return a warning if the run has too few steps to learn from, for example on a few dozen samples; else []."""
        training, steps = self.args.training, self.steps
        if training.max_steps > 0 or steps.num_steps >= FEW_STEPS:
            return []
        epochs = math.ceil(FEW_STEPS / max(1, steps.steps_per_epoch))
        return [
            f"WARNING: {steps.num_steps} steps are too few to learn much: give --num_train_epochs {epochs} or more, or "
            f"a --train_batch_size below {steps.batch_size}"
        ]

    def details(self) -> list[str]:
        """Return lines that describe data sources, sample lengths and the DeepSpeed configuration."""
        dataset = self.steps.dataset
        return [
            *dataset.descriptions,
            *dataset.token_counts(),
            f"DeepSpeed configuration ({self.args.training.deepspeed_config}, filled in):",
            *self.resolved.explain(),
        ]


@dataclass
class PlanDraft:
    """The part of the plan that exists when extensions make their plans, before data and steps are planned.

    raw_config: the user's DeepSpeed JSON; None if it has yet to be chosen.
    """

    args: Arguments
    model: ModelPlan
    images: ImageOptions
    ranks: Ranks
    raw_config: dict | None


def make_plan(start: Start) -> Plan:
    """Read and check the model folder, DeepSpeed JSON, data and the checkpoint to resume from. Prints a summary.

    Collective. Raises ConfigError and DataError on every rank.
    """
    ranks, max_shard_bytes = start.ranks, parse_size(start.args.training.max_shard_size)
    with first_rank_first(ranks):
        args = tiny.fill_in(start.args)
    args = args.replaced(version=resolve_template(args.model.version))
    model, images, form = _plan_model(args)
    if model.architecture is not None:
        tried = partial(model.architecture.try_out, model, images, args.data.cache_dir)
        print_first(broadcast_from_first(ranks, tried))
    extensions = active(args.own, model.text_config)
    own = extensions.plan(PlanDraft(args, model, images, ranks, start.raw_config))
    raw_config = start.raw_config
    if raw_config is None:
        raw_config, line = choice("deepspeed_config", CHOOSE_DS_CONFIG)(args, model, ranks)
        print_first(line)
    resolve = partial(
        resolve_ds_config,
        raw_config,
        dp=start.mesh.dp,
        hidden_size=model.hidden_size,
        device_type=ranks.device.type,
    )
    flops = model_flops(model.text_config, model.tower, args.model)
    resolved, steps, evals = _plan_steps(start, args, resolve, model, images, flops)
    # Machines may have chosen different Adams, because the choice depends on the installed compilers.
    same = {"the resolved optimizer": resolved.config.get("optimizer")}
    check_same(same, ranks, 'write "torch_adam" into optimizer.params, or install the same compilers on every machine')
    resume, lines = _plan_resume(resolved, steps.dataset, ranks)
    args = resolved.args
    export = ExportPlan(model, args.model, images, resolved.dtype, args.data.model_max_length, form, max_shard_bytes)
    plan = Plan(args, resolved, model, images, flops, steps, evals, resume, export, own)
    if not args.training.dry_run:  # a dry run prints these lines after its result
        print_details(*plan.details())
        print_first(*plan.describe())
    print_first(*lines)
    return plan


def _plan_model(args: Arguments) -> tuple[ModelPlan, ImageOptions, str]:
    """Plan the model and the format of its export."""
    model = plan_model(args.model, args.data.model_max_length, args.traits.scores)
    if model.architecture is not None and (lines := model.architecture.expert_problems(args)):  # also from the JSON
        raise ConfigError("\n".join(lines))
    if lines := clashes(features(args)):  # includes flags from the JSON and the model's folder
        raise ConfigError("\n".join(lines))
    check_model(args, model.text_config)
    print_first(*model.notes)
    if args.ranks_per_token > 1:
        model = dataclasses.replace(model, whole_last_layer="ranks that share a sample share it evenly")
    if note := length_note(model.text_config, args.data.model_max_length):
        print_first(note)
    refuse_unfit_tokenizer(args.model, model.tokenizer)
    images = model.tower.image_options(args)
    form, lines = export_format(args, model, images)
    print_first(*lines)
    return model, images, form


def _plan_steps(
    start: Start,
    args: Arguments,
    resolve: Callable[..., ResolvedConfig],
    model: ModelPlan,
    images: ImageOptions,
    flops: ModelFlops,
) -> tuple[ResolvedConfig, StepPlan, EvalSets]:
    """Open the data and plan the optimizer steps. resolve: resolves the DeepSpeed JSON for flags and num_steps."""
    # Resolve the JSON before the data is read, to report problems that don't depend on the data.
    ranks, dp = start.ranks, start.mesh.dp
    known_steps = args.training.max_steps if args.training.max_steps > 0 else None
    known = on_every_rank(ranks, partial(resolve, args, num_steps=known_steps))
    active(args.own).check(known)
    open_data = active(args.own).open_data or open_together
    dataset = open_data(known.args, model.tokenizer, images, ranks)
    dataset, eval_set, own = split_datasets(known.args, dataset, model.tokenizer, images, ranks)
    order = sample_order(known.args, dataset, dp)
    tokens = known.args.training.tokens_per_micro_batch
    if tokens == "auto":
        tokens = choice("tokens_per_micro_batch", tokens)(known, model, dataset, order, ranks)
    work = flops.of_rank(known.args.size_of("tp"))
    packing = Packing.of(known.args, dp, tokens, work.pair_cost, work.other_costs)
    per_epoch = steps_per_epoch(order, packing)
    num_steps = total_steps(known.args.training, per_epoch)
    # Resolve again from the given flags: some keys depend on the number of steps and on the chosen tokens.
    filled_in = args.replaced(tokens_per_micro_batch=tokens)
    resolved = on_every_rank(ranks, partial(resolve, filled_in, num_steps=num_steps))
    final = with_steps_of_epochs(known.args.replaced(tokens_per_micro_batch=tokens), per_epoch)
    resolved = dataclasses.replace(resolved, args=final)
    return resolved, StepPlan(dataset, order, packing, num_steps), EvalSets(eval_set, own)


def _plan_resume(resolved: ResolvedConfig, dataset: EncodedDataset, ranks: Ranks) -> tuple[ResumePlan, list[str]]:
    """Find the checkpoint to resume from. Returns the plan and lines to print. Rank 0 alone hashes the initial weights;
    the verification of the checkpoint is divided over all ranks."""
    args = resolved.args
    training, output_dir = args.training, Path(args.training.output_dir)
    identity = broadcast_from_first(
        ranks, partial(RunIdentity.of, args, dataset.fingerprint, ranks.world_size, resolved.config)
    )
    if training.save_strategy != "no" and not training.dry_run:
        check_shared_folder(output_dir, "--output_dir", ranks)
    allowed = training.allow_changed_flags
    point, lines = find_resume_point(training.resume, output_dir, identity, allowed, dataset.changes_since, ranks)
    weights = broadcast_from_first(ranks, lambda: weight_hashes(args, output_dir, point.path))
    return ResumePlan(point, identity, weights), lines
