"""The tensors of an engine that only its optimizer changes, by the attributes of DeepSpeed 0.19.8's optimizers."""

from collections.abc import Iterator

import torch

from llava_ds.extensions.integrity.checksums import Entry, row_sums


class States:
    """Lists this rank's tensors. rank: among the ranks that divide the optimizer's states."""

    def __init__(self, engine, rank: int) -> None:
        self.engine, self.optimizer, self.rank = engine, engine.optimizer, rank
        names = {p: name for name, p in engine.module.named_parameters()}
        self.names = names
        self.copies = getattr(self.optimizer, "parallel_partitioned_bit16_groups", [])  # ZeRO-1 and 2
        self.shards = getattr(self.optimizer, "fp16_partitioned_groups_flat", [])  # ZeRO-3
        groups = (
            self.optimizer.round_robin_bit16_groups
            if self.copies
            else self.optimizer.fp16_groups
            if self.shards
            else []
        )
        self.sizes = [
            [(names[p], p.partition_numel() if self.shards else p.numel()) for p in group] for group in groups
        ]

    def weights(self) -> Iterator[Entry]:
        """Yield the weights: all copies, or this rank's shards."""
        for p, name in self.names.items():
            if not (p.requires_grad and self.sizes):
                tensor = getattr(p, "ds_tensor", p)
                yield Entry(tensor, [(name, tensor.numel())])
        for parts, sizes in zip(self.copies, self.sizes):
            yield from (Entry(part, _cut(sizes, i * part.numel(), part.numel()), i) for i, part in enumerate(parts))
        yield from map(Entry, self.shards, self.sizes)

    def optimizer_states(self) -> Iterator[Entry]:
        """Yield fp32 copies and moments; not Adam's count of steps."""
        sizes = {id(master): each for master, each in zip(self._masters(), self._master_sizes())}
        for master, states in self.engine.basic_optimizer.state.items():
            named = states if master in self.names else {"fp32 copy": master, **states}
            own = sizes.get(id(master), [(self.names.get(master, "a parameter"), master.numel())])
            for name, value in named.items():
                if isinstance(value, torch.Tensor) and value.numel() == master.numel() and name != "step":
                    yield Entry(value, [(f"{each} ({name})", size) for each, size in own])

    def gradients(self) -> Iterator[Entry]:
        """Yield the gradients summed so far: input of the next backward pass or step."""
        flat = getattr(self.optimizer, "grad_partitions_flat_buffer", None)
        if flat is not None:
            yield Entry(flat, [pair for sizes in self.sizes for pair in sizes])
            return
        for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and 2: of the step, and while it accumulates
            for group in getattr(self.optimizer, name, {}).values():
                yield from (Entry(each, [("its shard", each.numel())]) for each in group or ())
        for p, name in self.names.items():
            gradient = p.grad if p.grad is not None else getattr(p, "grad_accum", None)
            if gradient is not None:
                yield Entry(gradient, [(name, gradient.numel())])

    def behind(self) -> torch.Tensor:
        """Count the weights that differ from the optimizer's rounded fp32 copies."""
        weights = [parts[self.rank] for parts in self.copies] or self.shards or self._whole("fp16_groups")
        pairs = [pair for pair in zip(weights, self._masters()) if pair[0].device == pair[1].device]
        wrong = [row_sums(master.detach().to(weight.dtype)).sum() != row_sums(weight).sum() for weight, master in pairs]
        return torch.stack(wrong).sum() if wrong else torch.zeros((), dtype=torch.int64, device=self.engine.device)

    def _masters(self) -> list[torch.Tensor]:
        if self.copies:
            return self.optimizer.single_partition_of_fp32_groups
        return self.optimizer.fp32_partitioned_groups_flat if self.shards else self._whole("fp32_groups")

    def _master_sizes(self) -> list[list[tuple[str, int]]]:
        if self.copies:
            parts = [(sizes, master.numel()) for sizes, master in zip(self.sizes, self._masters())]
            return [_cut(sizes, self.rank * number, number) for sizes, number in parts]
        return self.sizes or [[(self.names[p], p.numel())] for p in self._whole("fp16_groups")]

    def _whole(self, name: str) -> list[torch.Tensor]:
        """Return the optimizer's tensors at ZeRO-0 in bfloat16; none in fp32."""
        return [p for group in getattr(self.optimizer, name, []) for p in group]


def _cut(sizes: list[tuple[str, int]], first: int, number: int) -> list[tuple[str, int]]:
    """Cut elements first to first + number out of parameters laid end to end."""
    found, start = [], 0
    for name, size in sizes:
        inside = min(start + size, first + number) - max(start, first)
        if inside > 0:
            found.append((name, inside))
        start += size
    return found
