"""A check that the copies of a parameter stay the same on all ranks, bit for bit."""

from collections import Counter

import torch

from llava_ds.constants import DataError
from llava_ds.engine.expert_parallel import expert_part
from llava_ds.engine.tensor_parallel import part_of
from llava_ds.model.loading import bit_sum
from llava_ds.runtime.mesh import ALONE, Mesh
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.runtime.waiting import waiting

MOST_NAMED = 4  # parameters


def check_replicas(model: torch.nn.Module, step: int, every: int, ranks: Ranks, mesh: Mesh = ALONE) -> None:
    """Raise DataError on every rank if ranks hold copies of a parameter that differ; looks every so many steps.

    At ZeRO 0 to 2 that is every parameter. At 3 it is the small ones that stay gathered, whose copies are made again
    from their shards after every step. every: steps; 0 never looks; mesh: where ranks share matrices or experts, those
    with the same part hold copies. All ranks call it together. Reads every weight once, and waits for the device.
    """
    if every == 0 or step % every or ranks.world_size == 1:
        return
    sums = replica_sums(model)
    everyone = gather(list(sums.values()), ranks)
    parameters = dict(model.named_parameters())
    is_cut = [any(found(parameters[name]) is not None for found in (part_of, expert_part)) for name in sums]
    shared = mesh.tp * mesh.ep  # one of them is 1

    def usual(i: int, rank: int) -> int:
        peers = everyone[rank % shared :: shared] if is_cut[i] else everyone
        return Counter(each[i] for each in peers).most_common(1)[0][0]

    most_usual = [[usual(i, rank) for i in range(len(sums))] for rank in range(shared)]
    wrong = {
        rank: [n for n, a, b in zip(sums, mine, most_usual[rank % shared]) if a != b]
        for rank, mine in enumerate(everyone)
    }
    wrong = {rank: names for rank, names in wrong.items() if names}
    if wrong:
        lines = [
            f"  rank {rank}: {len(names):,} of {len(sums):,} parameters, {', '.join(names[:MOST_NAMED])}"
            for rank, names in wrong.items()
        ]
        most = 2 * len(wrong) < ranks.world_size
        odd = "differ from most others'" if most else "differ from the first rank's, and which are right is open"
        raise DataError(
            f"step {step:,}: the ranks no longer hold the same weights, which should be copies of each other. These "
            f"{odd}:\n" + "\n".join(lines) + f"\nthe memory, device or network of a rank is at fault, or code that "
            "runs on some ranks only. Take the machine out, and go on from a checkpoint of step "
            f"{step - every:,} or before, when they were last seen to be the same: --resume PATH"
        )


def replica_sums(model: torch.nn.Module) -> dict[str, int]:
    """The sum of the bits of every parameter that this rank holds whole, read as whole numbers, by name."""
    held = {name: p for name, p in model.named_parameters() if p.numel() and not _is_partitioned(p)}
    if not held:
        return {}
    sums = torch.stack([bit_sum(p.detach()) for p in held.values()])
    with waiting("sums of the weights"):
        return dict(zip(held, sums.tolist()))


def _is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """True if ZeRO-3 holds it in shards; those below its persistence threshold are gathered after every step."""
    return hasattr(parameter, "ds_id") and not parameter.ds_persist
