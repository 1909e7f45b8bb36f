"""Explain an out-of-memory error: where the run was, how much memory is in use, and which flags to change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from llava_ds.batch import Batch
from llava_ds.constants import ConfigError
from llava_ds.data.dataset import EncodedDataset, sample_ids
from llava_ds.data.step_plan import StepPlan
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.runtime.ranks import Ranks

if TYPE_CHECKING:
    from llava_ds.engine.warm_up import LargestMicroBatch

MOST_NAMED = 8  # maximum sample ids in a message


class MemoryWatch:
    """Context manager that turns an out-of-memory error into a ConfigError with the samples and flags to change."""

    def __init__(self, engine, resolved: ResolvedConfig, plan: StepPlan, done: Callable[[], int], ranks: Ranks) -> None:
        """done: function that returns the number of finished steps."""
        self._resolved, self._plan, self._done = resolved, plan, done
        self._ranks = ranks
        self._warming_up: list[int] | None = None
        self._step = self._index = -1  # finished steps at the last forward, and its micro-batch
        self._batch: Batch | None = None
        self._trains = True
        engine.register_forward_pre_hook(self._note)

    def _note(self, engine: torch.nn.Module, inputs: tuple) -> None:
        self._trains = engine.training
        self._index = self._index + 1 if self._step == self._done() else 0
        self._step, self._batch = self._done(), inputs[0]

    def __enter__(self) -> None:
        self._step, self._batch = -1, None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        from llava_ds.runtime.device_memory import first_line, in_use, is_out_of_memory

        if is_out_of_memory(error, self._ranks.device):
            from llava_ds.tracking.memory_advice import advice

            longest = int(np.max(self._plan.dataset.lengths))
            lines = [
                f"out of memory on {self._where()}",
                f"  {in_use(self._ranks.device)}, ZeRO stage {self._resolved.zero_stage}: {first_line(error)}",
                *(f"  {line}" for line in advice(self._resolved, self._batch, longest)),
            ]
            raise ConfigError("\n".join(lines)) from error

    @contextmanager
    def warm_up(self, largest: "LargestMicroBatch") -> Iterator[None]:
        """Context manager for the warm-up before the first step. largest: the micro-batch that it uses."""
        self._warming_up = largest.samples
        with self:
            yield
        self._warming_up = None

    def _where(self) -> str:
        """Describe the rank, the step, and the micro-batch with its samples."""
        place = f"rank {self._ranks.rank} ({self._ranks.device})"
        if self._batch is None:
            return f"{place} before the first micro-batch"
        if self._warming_up is not None:
            place += f" in the warm-up of the largest micro-batch, before step {self._step + 1:,}"
            samples = self._warming_up
        elif not self._trains:
            return f"{place} evaluating after step {self._step:,}: {_size(self._batch)}"
        elif self._done() > self._step:  # in a hook after the step
            return f"{place} after step {self._done():,}"
        elif self._resolved.args.traits.draws:
            return f"{place} training on answers in step {self._step + 1:,}: {_size(self._batch)}"
        else:
            mine = self._plan.of_rank(self._step + 1, self._ranks.rank)
            samples = mine[self._index]
            place += f" in step {self._step + 1:,}, micro-batch {self._index + 1} of {len(mine)}"
        return f"{place}: {_size(self._batch)}, {name_samples(self._plan.dataset, samples)}"


def _size(batch: Batch) -> str:
    return f"{batch.input_ids.shape[1]:,} tokens, {len(batch.pixel_values):,} image tiles"


def name_samples(dataset: EncodedDataset, samples: list[int]) -> str:
    """Return a text with the number of samples and the first ids."""
    ids = sample_ids(dataset, samples[:MOST_NAMED])
    more = f" and {len(samples) - MOST_NAMED:,} more" if len(samples) > MOST_NAMED else ""
    return f"{len(samples):,} samples ({', '.join(ids)}{more})"


def name_rank_samples(plan: StepPlan, step: int, rank: int) -> str:
    """Return a text with the number and the first ids of a rank's samples in an optimizer step."""
    return name_samples(plan.dataset, [sample for micro_batch in plan.of_rank(step, rank) for sample in micro_batch])
