"""Load a checkpoint of another number of ranks or ZeRO stage into a live engine.

DeepSpeed's universal checkpoint writes the complete model again, can't convert between stage 3 and other stages, and at
stage 3 gives every parameter group the first group's rate and decay (0.19.8). Here every rank maps the old files into
memory and copies only its own elements, found by parameter and position. fp32 weights and moments stay exact, no rank
needs memory for more than its share, and ranks exchange only the final bf16 weights.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from llava_ds.checkpoint.checkpoint_files import (
    SavedPiece,
    model_states,
    rank_states,
    saved_layouts,
    saved_optimizer,
    saved_pieces,
)
from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.placement import placement_of
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.engine.shards.pieces import REPLICATED, UNFUSED, ZERO_3, Layout, Piece, layout_of, masters, read_layout

# Optimizers that can't be re-sharded, because a weight's update depends on other weights of its shard or matrix.
WHOLE = {
    "Lamb": "Lamb's updates depend on norms over a rank's shard",
    "FusedLamb": "Lamb's updates depend on norms over a rank's shard",
    "Adafactor": "Adafactor keeps sums over rows and columns of a rank's shard",
    "Muon": "Muon keeps the momentum of whole matrices, differently at every stage",
    **dict.fromkeys(("AdamW8bit", "PagedAdamW8bit"), "8-bit states have scales per block of a rank's shard"),
    "MuonWithAuxAdam": "Muon keeps the momentum of whole matrices, differently at every stage",
}
# Optimizers with the same states.
FAMILIES = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), "Adam"),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion"), "Lion"),
}
# Keys of a parameter group that depend on the optimizer's implementation, so they are not restored.
OWN_KEYS = {"params", "name", "fused", "foreach", "capturable", "differentiable"}
SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def load_resharded(engine, checkpoint: Path, world_size: int, *, schedule: bool) -> None:
    """Restore an engine from a checkpoint of any ZeRO stage that world_size ranks wrote. Collective.

    Sets trained weights, optimizer states, counters, fp16's loss scale and, if `schedule` is True, the schedule.
    Raises ConfigError if the optimizer's states can't be re-sharded or the trained parameters differ, and DataError for
    files that don't match their layout.
    """
    live, saved = layout_of(engine), read_layout(checkpoint, 0)
    common = model_states(checkpoint / ENGINE)
    _refuse(live, saved)
    _check_trained(engine, {name for _, each in saved_layouts(checkpoint, world_size) for name in each.names})
    first = rank_states(saved, checkpoint / ENGINE, 0, world_size)
    if live.kind == ZERO_3:
        engine.optimizer.checkpoint_event_prologue()  # re-partitions gathered parameters
    fill(engine.basic_optimizer, masters(engine), live, saved_pieces(checkpoint, world_size, live))
    for group, before in _matching_groups(engine, checkpoint, world_size, saved, live):
        group.update({key: before[key] for key in before.keys() & group.keys() - OWN_KEYS})
    _update_weights(engine, live)
    if live.kind == ZERO_3:
        engine.optimizer.checkpoint_event_epilogue()
    if schedule and live.pp == saved.pp == 1:
        engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    elif schedule:  # the saved state lists the rates of one pipeline stage's groups, so it can't be loaded here
        _step_schedule(engine, common["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common[name])
    if engine.fp16_enabled():
        _set_loss_scale(engine, common["optimizer"] if saved.kind in REPLICATED else first)


def renew_rates(engine, groups: list[dict], checkpoint: Path) -> None:
    """Undo the checkpoint's effect on rates, decay and other settings: restore those the engine was created with.

    The schedule must be at its start, and is stepped to the checkpoint's position. groups: the optimizer's groups
    before the checkpoint was loaded.
    """
    for group, before in zip(engine.basic_optimizer.param_groups, groups):
        group.update({key: value for key, value in before.items() if key != "params"})
    _step_schedule(engine, model_states(checkpoint / ENGINE)["lr_scheduler"])


def _matching_groups(
    engine, checkpoint: Path, world_size: int, saved: Layout, live: Layout
) -> Iterator[tuple[dict, dict]]:
    """Yield each parameter group of the engine's optimizer with the corresponding group of the checkpoint.

    Groups of pipeline stages are matched by name, because a stage has groups for its own layers only.
    """
    groups, held = engine.basic_optimizer.param_groups, []
    for first in range(0, world_size, world_size // saved.pp):
        states = rank_states(saved, checkpoint / ENGINE, first, world_size)
        held += saved_optimizer(saved, states)["param_groups"]
    if live.pp == saved.pp == 1:
        yield from zip(groups, held)
        return
    by_name = {group["name"]: group for group in held}
    for group in groups:
        yield group, by_name[group["name"]]


def _step_schedule(engine, done: dict) -> None:
    """Step the schedule from its start to a checkpoint's position. done: the saved state of the schedule."""
    fresh = engine.lr_scheduler.state_dict()
    counter = "last_epoch" if "last_epoch" in fresh else "last_batch_iteration"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, because the optimizer takes no steps
        for _ in range(fresh[counter], done[counter]):
            engine.lr_scheduler.step()


def _refuse(live: Layout, saved: Layout) -> None:
    for name in (live.optimizer, saved.optimizer):
        if name in WHOLE:
            raise ConfigError(
                f"a checkpoint of {name} can't be re-sharded for another number of ranks or ZeRO stage: "
                f"{WHOLE[name]}. Start with the same number of ranks and ZeRO stage as at the save"
            )
    if FAMILIES.get(live.optimizer, live.optimizer) != FAMILIES.get(saved.optimizer, saved.optimizer):
        raise ConfigError(
            f"the checkpoint holds states of {saved.optimizer}, and {live.optimizer} can't use them: give the same "
            "optimizer"
        )


def _check_trained(engine, held: set[str]) -> None:
    """Raise ConfigError if the checkpoint's trained parameters are not the engine's. held: names in the checkpoint."""
    placement = placement_of(engine)
    shares = placement.held(engine.module).items()
    trained = {share.name for p, share in shares if p.requires_grad and math.prod(share.shape)}
    if placement.group is not None:
        everyone = [trained] * placement.size
        torch.distributed.all_gather_object(everyone, trained, group=placement.group)
        trained = set.union(*everyone)
    if trained != held:
        name = min(trained ^ held)
        raise ConfigError(
            f"{len(trained ^ held)} parameters (like {name}) train now but did not when the checkpoint was saved, or "
            "vice versa: train the same parts"
        )


def fill(
    optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor], live: Layout, pieces: Iterable[SavedPiece]
) -> None:
    """Copy this rank's elements from saved pieces into its optimizer's tensors and into new optimizer states.

    tensors: masters() of the engine; live: layout of these tensors. Raises DataError if weights are missing, and
    ConfigError if states can't be re-sharded.
    """
    own: dict[str, list[tuple[int, Piece]]] = {}
    for index, slot in enumerate(live.slots):
        for piece in slot:
            own.setdefault(piece.name, []).append((index, piece))
    missing = sum(piece.length for slot in live.slots for piece in slot)
    fresh: list[dict[str, object]] = [{} for _ in tensors]
    for saved in pieces:
        for index, target in own.get(saved.piece.name, []):
            if length := saved.piece.overlap(target):
                missing -= length
                _copy(saved, target, tensors[index], fresh[index], optimizer)
    if missing:
        raise DataError(f"{missing:,} of this rank's weights are missing from the checkpoint's files")
    for master, slot, states in zip(tensors, live.slots, fresh):
        if states:
            optimizer.state[master] = states
        elif slot:  # the checkpoint has no states yet; a slot that is only padding keeps its initial state
            optimizer.state.pop(master, None)


def _copy(saved: SavedPiece, target: Piece, master: torch.Tensor, states: dict, optimizer: torch.optim.Optimizer):
    """Copy the elements that both pieces contain: weights into `master`, per-weight optimizer states into `states`."""
    source, blocks = saved.piece, saved.piece.common(target)

    def copy(into: torch.Tensor, values: torch.Tensor) -> None:
        for block in blocks:
            rows = _flat(values).as_strided(block[:2], (block.from_step, 1), block.from_ + values.storage_offset())
            place = _flat(into).as_strided(block[:2], (block.to_step, 1), block.to + into.storage_offset())
            place.copy_(rows)

    copy(master, saved.master)
    for key, value in saved.states.items():
        if _is_per_element(key, value, saved.master):
            if key not in states:
                states[key] = torch.zeros_like(master, dtype=_moment_dtype(optimizer, value, master))
            copy(states[key], value)
            continue
        own = _scalar(key, value, optimizer, master.device)
        if states.setdefault(key, own) != own:
            raise DataError(
                f"{source.name} has {key} {value}, but others in its group have {states[key]}: expected one value"
            )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached flat view of a tensor."""
    return tensor.detach().view(-1)


def _is_per_element(key: str, value: object, master: torch.Tensor) -> bool:
    """Return True for a state with one number per weight, False for a scalar. Raises ConfigError for other tensors."""
    if not torch.is_tensor(value) or key == "step" or (value.ndim == 0 and master.ndim > 0):
        return False
    # Stages 1 and 2 save states with padding at the end, but weights without it.
    if value.ndim != master.ndim or value.numel() < master.numel():
        raise ConfigError(
            f"the optimizer state {key} has shape {tuple(value.shape)} for {master.numel()} weights and can't be "
            "re-sharded: start with the checkpoint's number of ranks and ZeRO stage"
        )
    return True


def _moment_dtype(optimizer: torch.optim.Optimizer, value: torch.Tensor, master: torch.Tensor) -> torch.dtype:
    """Return the precision that the optimizer itself uses for a state: the precision of its weights, or float32 if
    DeepSpeed's CPU optimizer is set to fp32 states."""
    if not value.is_floating_point():
        return value.dtype
    return torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else master.dtype


def _scalar(key: str, value: object, optimizer: torch.optim.Optimizer, device: torch.device) -> object:
    """Convert a state that a tensor's weights share, such as the step count, to the form that the optimizer uses.

    torch's optimizers use a tensor, on the weights' `device` if fused or capturable, else on the CPU; others a number.
    """
    if value is None:
        return None
    if not torch.is_tensor(value) and not isinstance(value, (int, float)):
        raise ConfigError(f"the optimizer state {key} is {value!r}: llava_ds can't re-shard it")
    if type(optimizer).__module__.startswith("torch."):
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return torch.tensor(float(value), dtype=torch.float32, device=device if on_device else "cpu")
    return int(value) if key == "step" else float(value)


def _update_weights(engine, live: Layout) -> None:
    """Copy the optimizer's master weights to the model's weights."""
    optimizer = engine.optimizer
    with torch.no_grad():
        if live.kind == ZERO_3:
            for index in range(len(live.slots)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
        elif live.kind not in REPLICATED:
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp16_groups"):
            weights = [p for group in optimizer.fp16_groups for p in group]
            tensors = masters(engine)
            if live.kind != UNFUSED:
                slots = zip(tensors, live.slots)
                tensors = [_flat(t)[piece.offset :][: piece.length] for t, pieces in slots for piece in pieces]
            for weight, master in zip(weights, tensors):
                weight.copy_(master.view_as(weight))


def _set_loss_scale(engine, saved: dict) -> None:
    """Set fp16's loss scale and its counters. saved: the saved state of DeepSpeed's optimizer."""
    before = saved.get("loss_scaler", saved)
    values = before if isinstance(before, dict) else vars(before)
    scaler = getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config
    for key in SCALER_KEYS:
        if values.get(key) is not None and hasattr(scaler, key):
            setattr(scaler, key, values[key])
