"""The state of training in a checkpoint: the engine's, and each rank's random number generators."""

import copy
import random
from pathlib import Path

import numpy as np
import torch

from llava_ds.checkpoint.resume import ResumePoint
from llava_ds.checkpoint.trainer_file import read_trainer
from llava_ds.constants import DataError
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import has_layout, layout_of, read_layout
from llava_ds.runtime.ranks import Ranks, gather

GROUP_STATES = {"params", "step"}  # keys of a parameter group that aren't rates; DeepSpeed's Adam and Lion count there


def restore(engine, point: ResumePoint, ranks: Ranks, seed: int) -> str:
    """Restore the engine and this rank's random states from a checkpoint. Returns a line about it. Collective.

    seed: for the random states of ranks that the checkpoint does not have.
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
    """Restore weights and optimizer states of a checkpoint; steps since then have no effect. Collective.

    The steps stay counted: schedule, rates, counters and random states keep their present values.
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
    """Load weights, optimizer states, schedule and counters of a checkpoint into the engine. Returns a line."""
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
        line = f"resumed at step {point.step}, bit for bit where it stopped"
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


def random_states(device: torch.device) -> dict[str, object]:
    """Return the generators' states as plain numbers and tensors: these load without running pickled code."""
    name, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, object], device: torch.device) -> None:
    """Set the generators to random_states; a GPU's is unchanged if the states are from a CPU.

    Raises DataError for anything but random_states' result.
    """
    try:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(states["torch"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"it has no random states: {type(error).__name__}: {error}"[:300]) from error


def seed_random_states(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a rank without saved states: the same at every resume from that step."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.manual_seed(int(words[2]))  # seeds all devices
