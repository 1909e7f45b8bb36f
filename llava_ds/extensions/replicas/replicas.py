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
    with the same part hold copies, of a pipeline those with the same stage. All ranks call it together. Reads every
    weight once, and waits for the device.
    """
    if every == 0 or step % every or ranks.world_size == 1:
        return
    sums = replica_sums(model)
    everyone = gather(list(sums.values()), ranks)
    cut = _cut_parameters(model, list(sums), mesh)
    of_stage, shared = ranks.world_size // mesh.pp, mesh.tp * mesh.ep  # one of the two is 1
    wrong = {}
    for first in range(0, ranks.world_size, of_stage):
        found = _odd_ones(everyone[first : first + of_stage], cut[first // of_stage], shared)
        wrong |= {first + rank: names for rank, names in found.items()}
    if wrong:
        lines = [
            f"  rank {rank}: {len(names):,} of {len(everyone[rank]):,} parameters, {', '.join(names[:MOST_NAMED])}"
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


def _cut_parameters(model: torch.nn.Module, own: list[str], mesh: Mesh) -> list[dict[str, bool]]:
    """The parameters of each stage, in the order of their sums, and whether ranks have parts of them. own: this rank's.

    Where there are several stages, every rank has whole parameters.
    """
    if mesh.pp == 1:
        parameters = dict(model.named_parameters())
        of_ranks = (part_of, expert_part)
        return [{name: any(found(parameters[name]) is not None for found in of_ranks) for name in own}]
    places = model.stage.places.items()
    return [{name: False for name, place in places if place.stage == stage} for stage in range(mesh.pp)]


def _odd_ones(everyone: list[list[int]], is_cut: dict[str, bool], shared: int) -> dict[int, list[str]]:
    """Names of the parameters whose sums differ from most others', by rank. everyone: the sums of ranks with the same
    parameters; is_cut: these, and whether of shared ranks each has a part of its own."""

    def usual(i: int, cut: bool, part: int) -> int:
        peers = everyone[part::shared] if cut else everyone
        return Counter(each[i] for each in peers).most_common(1)[0][0]

    most_usual = [[usual(i, cut, part) for i, cut in enumerate(is_cut.values())] for part in range(shared)]
    odd = {
        rank: [name for name, a, b in zip(is_cut, mine, most_usual[rank % shared]) if a != b]
        for rank, mine in enumerate(everyone)
    }
    return {rank: names for rank, names in odd.items() if names}


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
