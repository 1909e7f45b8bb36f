"""Compute one rank's checksums and counts around its engine's calls. Uses private names of DeepSpeed 0.19.8."""

import contextlib
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.loader import Window
from llava_ds.engine.runner import Runner
from llava_ds.engine.shards.pieces import layout_of, masters
from llava_ds.extensions.base import SessionPart

ROW = 1024  # 64-bit words per checksum, and so the precision with which a changed bit is located
SMALL = 2**16  # bytes; smaller tensors are concatenated, to compute one sum instead of many
EARLIER = 4  # number of earlier steps whose optimizer states are compared with the current ones, to find stale shards
EARLIER_BATCHES = 16  # number of steps whose tokens are stored, to recognize a repeated batch

# A tensor to watch, and the name, first element and end of every parameter in it.
Entry = tuple[torch.Tensor, Sequence[tuple[str, int, int]]]


class Snapshot:
    """Row sums of tensors at one moment. sums: (rows,) int64, on the device. Small tensors of one dtype share rows."""

    def __init__(self, entries: Iterable[Entry], device: torch.device) -> None:
        self.device, self.groups = device, {}
        for tensor, parts in entries:
            key = (tensor.dtype, tensor.device) if tensor.nbytes < SMALL else len(self.groups)
            self.groups.setdefault(key, []).append((tensor, parts))
        self.by_group = self._sum()
        self.sums = torch.cat(self.by_group)

    def _sum(self) -> list[torch.Tensor]:
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return [none, *(row_sums(*(each for each, _ in group)).to(self.device) for group in self.groups.values())]

    def changed(self) -> torch.Tensor:
        """Sum the tensors again, and return which rows differ from the snapshot, (rows,) bool."""
        return torch.cat(self._sum()) != self.sums

    def names(self, changed: torch.Tensor) -> list[str]:
        """Return the names of the parameters in the changed rows. changed: from changed()."""
        found = []
        _, *of_groups = changed.split([len(sums) for sums in self.by_group])
        for group, rows in zip(self.groups.values(), of_groups):
            per_row = 8 * ROW // group[0][0].element_size()
            firsts = itertools.accumulate((tensor.numel() for tensor, _ in group), initial=0)
            for first, (_, parts) in zip(firsts, group):
                spans = [(name, (first + a) // per_row, (first + b - 1) // per_row) for name, a, b in parts]
                found += [name for name, low, high in spans if rows[low : high + 1].any()]
        return list(dict.fromkeys(found))


def row_sums(*tensors: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors of one dtype, and sum each row of ROW words as int64 with wraparound. Returns (rows,) int64;
    the last row is the sum of the remaining bytes."""
    flat, *others = (tensor.detach().reshape(-1) for tensor in tensors)
    size = flat.element_size()
    if others or flat.storage_offset() * size % 8:
        flat = torch.cat([flat, *others])  # copy, because a view as int64 has to be aligned to 8 bytes
    whole = flat.numel() * size // 8 * 8 // size
    words = flat[:whole].view(torch.int64)
    full = words.numel() // ROW * ROW
    rest = words[full:].sum() + flat[whole:].view(torch.uint8).sum()
    return torch.cat([words[:full].view(-1, ROW).sum(1), rest[None]])


class States:
    """Lists this rank's tensors. rank: this rank's index among the ranks that partition the optimizer's states."""

    def __init__(self, engine, rank: int) -> None:
        self.engine, self.optimizer, self.rank = engine, engine.optimizer, rank
        self.names = {p: name for name, p in engine.module.named_parameters()}
        self.partitions = getattr(self.optimizer, "parallel_partitioned_bit16_groups", ())  # ZeRO-1, 2: all ranks'
        self.shards = getattr(self.optimizer, "fp16_partitioned_groups_flat", ())  # ZeRO-3
        self.slots = [[(p.name, p.offset, p.offset + p.length) for p in slot] for slot in layout_of(engine).slots]

    def weights(self) -> Iterator[Entry]:
        """Yield the weights on this rank: complete at ZeRO-0 to 2, shards at ZeRO-3."""
        for p, name in self.names.items():
            if not (p.requires_grad and (self.partitions or self.shards)):
                tensor = getattr(p, "ds_tensor", p)
                yield tensor, [(name, 0, tensor.numel())]
        for i in range(len(self.partitions)):
            places = ((self.names[p], p.storage_offset(), p.numel()) for p in self.optimizer.bit16_groups[i])
            yield self.optimizer.bit16_groups_flat[i], [(name, begin, begin + size) for name, begin, size in places]
        yield from zip(self.shards, self.slots)

    def optimizer_states(self) -> Iterator[Entry]:
        """Yield fp32 copies and moments, without Adam's step count."""
        states = self.engine.basic_optimizer.state
        for master, parts in zip(masters(self.engine), self.slots):
            copy = {} if master in self.names else {"fp32 copy": master}
            for state, value in (copy | states.get(master, {})).items():
                if isinstance(value, torch.Tensor) and value.numel() == master.numel() and state != "step":
                    yield value, [(f"{name} ({state})", *span) for name, *span in parts]

    def gradients(self) -> Iterator[Entry]:
        """Yield the gradients accumulated so far, the input of the next backward pass or optimizer step."""
        flat = getattr(self.optimizer, "grad_partitions_flat_buffer", None)
        if flat is not None:
            yield from zip(flat.split([master.numel() for master in masters(self.engine)]), self.slots)
            return
        for name in ("averaged_gradients", "all_grad_tensors"):  # ZeRO-1 and 2: final, and during accumulation
            for group in getattr(self.optimizer, name, {}).values():
                yield from ((each, ()) for each in group or ())
        for p, name in self.names.items():
            gradient = p.grad if p.grad is not None else getattr(p, "grad_accum", None)
            if gradient is not None:
                yield gradient, [(name, 0, gradient.numel())]

    def written(self) -> dict[str, torch.Tensor | int]:
        """Check the optimizer's last step.

        Returns "behind", the number of tensors that differ from their rounded fp32 copies; "own", the checksum of the
        weights that this rank's optimizer writes at ZeRO-1 and 2; "copies", the checksum of all ranks' such weights.
        """
        own, whole = [parts[self.rank] for parts in self.partitions], getattr(self.optimizer, "fp16_groups", ())
        pairs = zip(own or self.shards or itertools.chain(*whole), masters(self.engine))  # whole: ZeRO-0 in bfloat16
        rounded = [(w, m.to(w.dtype)) for w, m in pairs if w.device == m.device]
        behind = sum((row_sums(w).sum() != row_sums(each).sum()).long() for w, each in rounded)
        sums = {"own": own, "copies": itertools.chain(*self.partitions)}
        return {"behind": behind} | {name: sum(row_sums(part).sum() for part in each) for name, each in sums.items()}


class Watch(SessionPart):
    """Watches one rank. every: steps between checks of the states; counts: the step's values of Report's fields;
    details: pairs of a snapshot and its changed rows."""

    def started(self, runner: Runner) -> None:
        """Wrap the engine's methods with the checks."""
        self.engine, self.step, self.marks = runner.engine, 0, []
        self.every = self.plan.args.own["integrity"].check_integrity_steps
        self.states = States(self.engine, self.mesh.dp_rank)
        # True if all ranks hold copies of the same weights.
        self.has_copies = not (self.mesh.places or self.mesh.in_data or self.states.shards)
        self._forget()
        wraps = {"backward": self._backward, "step": self._step, "load_checkpoint": self._loading}
        if self.engine.device.type == "cuda":
            wraps["forward"] = self._forward
        for name, around in wraps.items():
            setattr(self.engine, name, around()(getattr(self.engine, name)))

    def _forget(self) -> None:
        """Drop all sums and counts, for example because a checkpoint replaced the states."""
        self.kept: dict[str, Snapshot] = {}
        self.gradients: Snapshot | None = None
        self.earlier: deque[list[torch.Tensor]] = deque(maxlen=EARLIER)
        self.counts, self.details = defaultdict(int), []

    def windows(self, engine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        """Count each window's tokens. Compares samples with the plan if they are known and ranks don't share them."""
        steps, self.seen = self.plan.steps, deque(maxlen=EARLIER_BATCHES)
        knows = self.mesh.shared == 1 and not self.plan.args.traits.draws and steps.dataset.is_whole
        layouts, self.step, self.marks, self.began = steps.after(done), done, [], time.process_time()
        self._forget()  # the warm-up's gradients
        self._keep()
        for window in plain:
            self.step += 1
            self.counts, self.details = defaultdict(int), []
            if knows:
                self._check(window, next(layouts).of_ranks[self.mesh.dp_rank])
            self.counts["work"] = window.counts.tokens
            # On a GPU, this is the time of the previous step's forward passes.
            self.counts["spent_us"] = int(1e3 * sum(begin.elapsed_time(end) for begin, end in self.marks))
            self.marks = []
            yield window
            self.began = time.process_time()

    def _keep(self) -> None:
        """Store the sums of the states if this step or the next one is checked."""
        if (self.step + 1) % self.every == 0 or self.step % self.every == 0:
            states = {"weight": self.states.weights(), "state": self.states.optimizer_states()}
            self.kept = {kind: Snapshot(entries, self.engine.device) for kind, entries in states.items()}
            # Leave out shards of weights: in bfloat16, a small learning rate may not change them for several steps.
            self.earlier.append([self.kept[kind].sums for kind in ("state", "weight")[: 1 + self.has_copies]])

    def _compare(self, **kept: Snapshot | None) -> None:
        for kind, snapshot in kept.items():
            if snapshot is not None:
                changed = snapshot.changed()
                self.counts[kind] += changed.sum()
                self.details.append((snapshot, changed))

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        yield
        self._forget()

    @contextlib.contextmanager
    def _forward(self) -> Iterator[None]:
        self.marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        self.marks[-1][0].record()
        yield
        self.marks[-1][1].record()

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        self._compare(gradient=self.gradients)
        yield
        is_checked = self.step % self.every == 0
        self.gradients = Snapshot(self.states.gradients(), self.engine.device) if is_checked else None

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        if not self.engine.is_gradient_accumulation_boundary():
            yield
            return
        if self.engine.device.type == "cpu":
            self.counts["spent_us"] = int(1e6 * (time.process_time() - self.began))
        is_checked, gradients, before = self.step % self.every == 0, self.gradients, [*self.earlier]
        self._compare(gradient=gradients, **(self.kept if is_checked else {}))
        yield
        self.gradients = None
        self._keep()
        if is_checked and before and gradients:
            pairs = [pair for then in before for pair in zip(self.earlier[-1], then)]
            same = sum((now == then).all() for now, then in pairs if len(now) == len(then) > 0)
            self.counts |= self.states.written() | {"stale": same * (gradients.sums != 0).any()}
            self.counts["all"] = self.kept["weight"].sums.sum() * self.has_copies

    def _check(self, window: Window, planned: list[list[int]]) -> None:
        """Compare each micro-batch's number of supervised tokens, and the tokens of its first sample, with the plan."""
        dataset, ids = self.plan.steps.dataset, torch.cat([batch.input_ids[0] for batch in window.batches])
        wrong = never = torch.zeros((), dtype=torch.bool, device=ids.device)
        for micro, plan in zip(window.micro_batches, planned):
            found, samples = micro.batch.input_ids[0], [plan[place] for place in micro.places if place < len(plan)]
            if len(samples) < len(micro.places) or dataset.num_targets[samples].sum() != micro.num_targets:
                wrong = ~never
            for item in dataset.undecoded(*samples[:1]):
                if not isinstance(item, BrokenSample):
                    first = item.samples[0].input_ids[: len(found)]
                    first = first.masked_fill(first == IMAGE_TOKEN_INDEX, 0).to(found.device, non_blocking=True)
                    wrong = wrong | (found[: len(first)] != first).any()
        again = torch.stack([never, *((ids == other).all() for other in self.seen if len(other) == len(ids))]).any()
        self.seen.append(ids)
        self.counts |= {"twice": wrong & again, "missed": wrong & ~again}
