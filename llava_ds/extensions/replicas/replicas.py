"""Check that all ranks' copies of a parameter are equal, bit for bit."""

from collections import Counter, defaultdict

import torch

from llava_ds.constants import DataError
from llava_ds.engine.placement import Slice, placement_of
from llava_ds.model.open.loading import bit_sum
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.waiting import waiting

MOST_NAMED = 4  # maximum number of parameters named in a message


def check_replicas(model: torch.nn.Module, step: int, every: int, ranks: Ranks) -> None:
    """Raise DataError on every rank if copies of a parameter differ. Collective.

    At ZeRO 0 to 2 every parameter is compared. At ZeRO-3, only small ones that stay gathered are compared; their copies
    are rebuilt from shards after every step. every: number of steps between checks. Reads every weight once, and waits
    for the device.
    """
    everyone = gather(replica_sums(model), ranks)
    if wrong := _odd_ones(everyone):
        lines = [
            f"  rank {rank}: {len(names):,} of {len(everyone[rank]):,} parameters, {', '.join(names[:MOST_NAMED])}"
            for rank, names in wrong.items()
        ]
        most = 2 * len(wrong) < ranks.world_size
        odd = "differ from most others'" if most else "differ from the first rank's; either may be the right ones"
        raise DataError(
            f"step {step:,}: the ranks no longer hold the same weights, but these should be equal copies. These "
            f"{odd}:\n" + "\n".join(lines) + f"\nthe memory, device or network of a rank is at fault, or code that "
            "runs on some ranks only. Take the machine out, and resume from a checkpoint of step "
            f"{step - every:,} or before, when the copies were last equal: --resume PATH"
        )


def _odd_ones(everyone: list[dict[tuple[str, Slice], int]]) -> dict[int, list[str]]:
    """Return, by rank, the parameters whose sum differs from that of most ranks with the same slice."""
    counts: dict[tuple[str, Slice], Counter[int]] = defaultdict(Counter)
    for sums in everyone:
        for part, value in sums.items():
            counts[part][value] += 1
    usual = {part: counter.most_common(1)[0][0] for part, counter in counts.items()}
    odd = ([part[0] for part, value in sums.items() if value != usual[part]] for sums in everyone)
    return {rank: names for rank, names in enumerate(odd) if names}


def replica_sums(model: torch.nn.Module) -> dict[tuple[str, Slice], int]:
    """Return each parameter's sum of bits, read as integers, keyed by its name in the complete model and its slice.

    Leaves out parameters of which this rank holds only a ZeRO-3 shard.
    """
    shares = placement_of(model).held(model).items()
    held = {(share.name, share.slice): p for p, share in shares if p.numel() and not _is_partitioned(p)}
    if not held:
        return {}
    sums = torch.stack([bit_sum(p.detach()) for p in held.values()])
    with waiting("sums of the weights"):
        return dict(zip(held, sums.tolist()))


def _is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """Return True if ZeRO-3 shards it. Parameters below the persistence threshold are gathered after every step."""
    return hasattr(parameter, "ds_id") and not parameter.ds_persist
