"""Restore the training state of a checkpoint: the engine's state and each rank's random number generators."""

import copy
from pathlib import Path

from llava_ds.checkpoint.resume import ResumePoint
from llava_ds.checkpoint.trainer_file import read_trainer
from llava_ds.constants import DataError
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import has_layout, layout_of, read_layout
from llava_ds.runtime.random_states import random_states, seed_random_states, set_random_states
from llava_ds.runtime.ranks import Ranks, gather

GROUP_STATES = {
    "params",
    "step",
}  # keys of a parameter group that are not settings: DeepSpeed's Adam and Lion count steps there


def restore(engine, point: ResumePoint, ranks: Ranks, seed: int) -> str:
    """Restore the engine and this rank's random states from a checkpoint. Returns a line to print. Collective.

    seed: seeds the generators of ranks that did not exist when the checkpoint was saved.
    """
    from llava_ds.engine.shards import safe_load

    line = _load(engine, point, ranks)
    if ranks.rank < point.world_size:
        file = point.path / f"random-{ranks.rank}.pt"
        try:
            set_random_states(safe_load.load(file), ranks.device)
        except DataError as error:
            raise DataError(f"{file} can't be used: {error}") from error
    else:
        seed_random_states(seed, point.step, ranks.rank)
    return line


def rewind(engine, path: Path, ranks: Ranks) -> None:
    """Restore weights and optimizer states of a checkpoint. Collective.

    The undone steps still count: schedule, rates, counters and random states keep their current values.
    """
    trainer = read_trainer(path)
    counters = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")}
    schedule, generators = copy.deepcopy(engine.lr_scheduler.state_dict()), random_states(ranks.device)
    rates = [{key: group[key] for key in group.keys() - GROUP_STATES} for group in engine.basic_optimizer.param_groups]
    _load(engine, ResumePoint(path, trainer["step"], trainer["identity"]["world_size"]), ranks)
    engine.lr_scheduler.load_state_dict(schedule)
    for group, before in zip(engine.basic_optimizer.param_groups, rates):
        group.update(before)
    for name, value in counters.items():
        setattr(engine, name, value)
    set_random_states(generators, ranks.device)


def _load(engine, point: ResumePoint, ranks: Ranks) -> str:
    """Load weights, optimizer states, schedule and counters into the engine. Returns a line to print."""
    from llava_ds.engine.shards import safe_load

    groups = [{**group, "params": None} for group in engine.basic_optimizer.param_groups]
    same = point.world_size == ranks.world_size and (
        not has_layout(point.path) or read_layout(point.path, ranks.rank) == layout_of(engine)
    )
    if all(gather(same, ranks)):
        with safe_load.without_code(point.path):
            loaded, _ = engine.load_checkpoint(
                str(point.path), tag=ENGINE, load_module_strict=False, load_lr_scheduler_states=not point.changed
            )
        if loaded is None:
            raise RuntimeError(f"DeepSpeed loaded nothing from {point.path}")
        line = f"resumed at step {point.step}, with bit-identical state"
    else:
        from llava_ds.checkpoint.reshard import load_resharded

        load_resharded(engine, point.path, point.world_size, schedule=not point.changed)
        line = f"resumed at step {point.step}: weights and states re-sharded from {point.world_size} ranks"
        if ranks.world_size > point.world_size:
            line += "; new ranks start new random numbers"
    if point.changed:
        from llava_ds.checkpoint.reshard import renew_rates

        renew_rates(engine, groups, point.path)
    return line
