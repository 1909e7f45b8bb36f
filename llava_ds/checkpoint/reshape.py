"""A checkpoint of another number of ranks, or of another ZeRO stage, into a live engine.

DeepSpeed's own way, the universal checkpoint, writes the whole model once more, does not go from stage 3 to the others
or back, and in 0.19.8 gives every parameter group the first one's rate and decay at stage 3. Here every rank maps the
old files into memory and copies the numbers that it keeps itself, by parameter and position: fp32 weights and moments
come over exactly, no rank holds more than its share, and nothing is sent between ranks but the finished bf16 weights.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from llava_ds.constants import ConfigError, DataError
from llava_ds.engine.checkpoint_files import model_states, optimizer_states
from llava_ds.engine.shards import (
    REPLICATED,
    UNFUSED,
    ZERO_3,
    Layout,
    Piece,
    layout_of,
    masters,
    read_layout,
    saved_masters,
    saved_optimizer,
)

# Optimizers whose states of a weight do not say all about it, or follow from more than this weight's own gradients.
WHOLE = {
    "Lamb": "Lamb's updates depend on norms of what a rank holds",
    "FusedLamb": "Lamb's updates depend on norms of what a rank holds",
    "Adafactor": "Adafactor keeps sums over rows and columns of what a rank holds",
    "Muon": "Muon keeps the momentum of whole matrices, in another way at every stage",
    "MuonWithAuxAdam": "Muon keeps the momentum of whole matrices, in another way at every stage",
}
# Classes with the same states.
FAMILIES = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), "Adam"),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion"), "Lion"),
}
COUNT_IN_LAST = ("FusedAdam", "FusedLion")
# How an optimizer computes, which is this run's own.
OWN_KEYS = {"params", "fused", "foreach", "capturable", "differentiable"}
SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def load_reshaped(engine, checkpoint: Path, engine_dir: Path, world_size: int, *, schedule: bool) -> None:
    """Bring an engine to where a checkpoint of world_size ranks was saved, whatever its ZeRO stage.

    Sets trained weights, optimizer states, schedule (unless told not to), counters and fp16's loss scale. All ranks
    call it together.
    Raises ConfigError where the optimizer's states can't be cut anew, or other parameters train than did; DataError for
    files that do not hold what their layout says.
    """
    live, saved = layout_of(engine), read_layout(checkpoint, 0)
    common = model_states(engine_dir)
    _refuse(engine, live, saved, common)
    first = common if saved.kind in REPLICATED else optimizer_states(engine_dir, 0)
    if live.kind == ZERO_3:
        engine.optimizer.checkpoint_event_prologue()  # what it holds whole lies in parts again
    pieces = saved_pieces(checkpoint, engine_dir, world_size, live)
    fill(engine.basic_optimizer, masters(engine), live, pieces)
    for group, before in zip(engine.basic_optimizer.param_groups, saved_optimizer(saved, first)["param_groups"]):
        group.update({key: before[key] for key in before.keys() & group.keys() - OWN_KEYS})
    _hand_down(engine, live)
    if live.kind == ZERO_3:
        engine.optimizer.checkpoint_event_epilogue()
    if schedule:
        engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, common[name])
    if engine.fp16_enabled():
        _set_loss_scale(engine, common["optimizer"] if saved.kind in REPLICATED else first)


def renew_rates(engine, groups: list[dict], engine_dir: Path) -> None:
    """Let what an engine was made with win over what its checkpoint says of rates, decay and the like, which may have
    changed: the schedule, still at its beginning, is stepped to where the checkpoint's was.

    groups: the optimizer's, as they were before the checkpoint was loaded.
    """
    for group, before in zip(engine.basic_optimizer.param_groups, groups):
        group.update({key: value for key, value in before.items() if key != "params"})
    done, fresh = model_states(engine_dir)["lr_scheduler"], engine.lr_scheduler.state_dict()
    counter = "last_epoch" if "last_epoch" in fresh else "last_batch_iteration"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects the optimizer to have stepped as often
        for _ in range(fresh[counter], done[counter]):
            engine.lr_scheduler.step()


def _ranks(layout: Layout, world_size: int) -> range:
    """Those whose files say something that no other rank's does."""
    return range(1 if layout.kind in REPLICATED else world_size)


def _refuse(engine, live: Layout, saved: Layout, common: dict) -> None:
    for name in (live.optimizer, saved.optimizer):
        if name in WHOLE:
            raise ConfigError(
                f"a checkpoint of {name} can't be brought to another number of ranks or another ZeRO stage: "
                f"{WHOLE[name]}. Start the ranks, and give the stage, that it was saved with"
            )
    if FAMILIES.get(live.optimizer, live.optimizer) != FAMILIES.get(saved.optimizer, saved.optimizer):
        raise ConfigError(
            f"the checkpoint holds states of {saved.optimizer}, which {live.optimizer} has no use for: give the same "
            "optimizer"
        )
    own = (p for p in engine.module.parameters() if p.requires_grad and getattr(p, "ds_numel", p.numel()))
    trained = {engine.param_names[p] for p in own}
    # Under ZeRO a rank may hold nothing of some.
    held = saved.names if saved.kind in REPLICATED else {name for group in common["param_shapes"] for name in group}
    if trained != held:
        name = min(trained ^ held)
        raise ConfigError(
            f"{len(trained ^ held)} parameters (like {name}) train now and did not when the checkpoint was saved, or "
            "the other way round: let the same parts train"
        )


def saved_pieces(
    checkpoint: Path, engine_dir: Path, world_size: int, live: Layout
) -> Iterator[tuple[Piece, torch.Tensor, dict[str, object]]]:
    """Every piece that was saved of what a rank keeps, the tensor that holds it, and the optimizer's states of that.

    Raises DataError for files that can't be read, or that do not hold what their layout says.
    """
    mine: dict[str, list[Piece]] = {}
    for own in itertools.chain.from_iterable(live.slots):
        mine.setdefault(own.name, []).append(own)
    for rank in _ranks(read_layout(checkpoint, 0), world_size):
        layout = read_layout(checkpoint, rank)
        wanted = [
            [piece for piece in slot if any(_overlap(piece, own) for own in mine.get(piece.name, []))]
            for slot in layout.slots
        ]
        if not any(wanted):
            continue  # its file is not opened
        states = model_states(engine_dir) if layout.kind in REPLICATED else optimizer_states(engine_dir, rank)
        held, moments = saved_masters(layout, states), _counted(layout, saved_optimizer(layout, states))
        if len(held) != len(layout.slots):
            raise DataError(f"{checkpoint}: rank {rank} saved {len(held)} tensors, its layout has {len(layout.slots)}")
        for index, (pieces, master) in enumerate(zip(wanted, held)):
            for piece in pieces:
                yield piece, master, moments.get(index, {})


def _counted(layout: Layout, optimizer: dict) -> dict[int, dict[str, object]]:
    """The states of each tensor, with their count of steps: DeepSpeed 0.19.8's fused kernels count in the last tensor
    of a group alone."""
    state = optimizer["state"]
    if layout.optimizer not in COUNT_IN_LAST:
        return state
    counted = {}
    for group in optimizer["param_groups"]:
        held = [index for index in group["params"] if index in state]
        steps = max((state[index]["step"] for index in held), default=0)
        counted.update({index: {**state[index], "step": steps} for index in held})
    return counted


def fill(
    optimizer: torch.optim.Optimizer,
    tensors: list[torch.Tensor],
    live: Layout,
    pieces: Iterable[tuple[Piece, torch.Tensor, dict[str, object]]],
) -> None:
    """Copy out of what was saved what this rank keeps: into the tensors that its optimizer updates, and new states.

    tensors: as masters() has them; live: what lies in them; pieces: as saved_pieces() has them.
    Raises DataError where weights are missing, ConfigError where states can't be cut.
    """
    mine: dict[str, list[tuple[int, Piece]]] = {}
    for index, slot in enumerate(live.slots):
        for piece in slot:
            mine.setdefault(piece.name, []).append((index, piece))
    missing = sum(piece.length for slot in live.slots for piece in slot)
    fresh: dict[int, dict[str, object]] = {index: {} for index in range(len(tensors))}
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for source, saved_master, moments in pieces:
        for index, target in mine.get(source.name, []):
            length = _overlap(source, target)
            if not length:
                continue
            first = max(source.start, target.start)
            here, there = target.offset + first - target.start, source.offset + first - source.start
            master, states = tensors[index], fresh[index]
            _flat(master)[here : here + length] = _flat(saved_master)[there : there + length].to(master.device)
            missing -= length
            for key, value in moments.items():
                if _is_per_element(key, value, saved_master):
                    if key not in states:
                        states[key] = torch.zeros_like(master, dtype=_moment_dtype(optimizer, value, master))
                    _flat(states[key])[here : here + length] = _flat(value)[there : there + length].to(master.device)
                else:
                    own = _scalar(key, value, optimizer, master.device if fused else torch.device("cpu"))
                    if key in states and states[key] != own:
                        raise DataError(
                            f"{source.name} has {key} {value}, others beside it {states[key]}: they can't be one group"
                        )
                    states[key] = own
    if missing:
        raise DataError(f"{missing:,} of this rank's weights are in no file of the checkpoint")
    for master, slot, states in zip(tensors, live.slots, fresh.values()):
        if states:
            optimizer.state[master] = states
        elif slot:  # no step was taken yet; what is nothing but padding stays as it was made
            optimizer.state.pop(master, None)


def _overlap(one: Piece, other: Piece) -> int:
    """How many numbers of a parameter are in both."""
    return max(0, min(one.start + one.length, other.start + other.length) - max(one.start, other.start))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all its numbers."""
    return tensor.detach().view(-1)


def _is_per_element(key: str, value: object, master: torch.Tensor) -> bool:
    """Whether a state has a number for each weight. Raises ConfigError for tensors of another kind."""
    if not torch.is_tensor(value) or key == "step" or (value.ndim == 0 and master.ndim > 0):
        return False
    # Stages 1 and 2 save weights without the padding at their end, and states with it.
    if value.ndim != master.ndim or value.numel() < master.numel():
        raise ConfigError(
            f"the optimizer's state {key} has the shape {tuple(value.shape)} for {master.numel()} weights, which can't "
            "be cut anew: start the ranks, and give the stage, that the checkpoint was saved with"
        )
    return True


def _moment_dtype(optimizer: torch.optim.Optimizer, value: torch.Tensor, master: torch.Tensor) -> torch.dtype:
    """As the optimizer would make it: of its weights' precision, but for DeepSpeed's on the CPU."""
    if not value.is_floating_point():
        return value.dtype
    return torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else master.dtype


def _scalar(key: str, value: object, optimizer: torch.optim.Optimizer, device: torch.device) -> object:
    """A state that a whole tensor of weights shares, like the count of steps, as the optimizer's class keeps it: torch
    in tensors, DeepSpeed in numbers."""
    if value is None:
        return None
    if not torch.is_tensor(value) and not isinstance(value, (int, float)):
        raise ConfigError(f"the optimizer's state {key} is {value!r}, of which it is not known how to cut it anew")
    if type(optimizer).__module__.startswith("torch."):
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    return int(value) if key == "step" else float(value)


def _hand_down(engine, live: Layout) -> None:
    """Let the model's own weights follow the optimizer's."""
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
    """fp16's scale and what it counts. saved: of a ZeRO optimizer, or of DeepSpeed's at stage 0."""
    before = saved.get("loss_scaler", saved)
    values = before if isinstance(before, dict) else vars(before)
    scaler = getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config
    for key in SCALER_KEYS:
        if values.get(key) is not None and hasattr(scaler, key):
            setattr(scaler, key, values[key])
