"""run_many.py with silent corruption: a list of [command line, plan of faults, file for what was found].

A plan has {"every", "kinds", "number", "seed"}: every so many steps one fault of the next kind on a rank drawn at
random. A fault that is found does not end the run: the step is undone.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "workers"))

from run_many import leave_no_model, load_train

from llava_ds.extensions.integrity import extension
from llava_ds.model.llava import LlavaModel
from llava_ds.train import session as sessions

SLOW_STEPS = 8  # of a slow rank; as many pass before the next fault


class Corruption:
    """The faults of a run: [step, rank, kind, variant]; and what was said, by step."""

    def __init__(self, every: int, kinds: list[str], number: int, seed: int) -> None:
        self.random, self.faults, step = random.Random(seed), [], 12
        for i in range(number):
            for kind in kinds:
                self.faults.append([step, self.random.randrange(2), kind, i])
                step += 2 * SLOW_STEPS + 4 if kind == "slow" else every
        self.said, self.saved, self.step, self.watched = {}, [], 0, None

    def at(self, *kinds: str) -> int | None:
        """Variant of the step's fault on this rank, if it is of such a kind."""
        for step, rank, kind, variant in self.faults:
            is_now = step <= self.step < step + SLOW_STEPS if kind == "slow" else step == self.step
            if is_now and kind in kinds and rank == torch.distributed.get_rank():
                return variant
        return None

    def flip(self, entries) -> None:
        flat = self.random.choice([tensor for tensor, _ in entries if tensor.numel()]).detach().view(-1)
        bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
        bit = torch.tensor(1 << self.random.randrange(8 * flat.element_size()), dtype=torch.int64)
        bits[self.random.randrange(len(bits))] ^= bit.to(bits.dtype)

    def tensors(self) -> list[torch.Tensor]:
        states = self.watched.states
        adam = states.engine.basic_optimizer
        counts = [state["step"] for state in adam.state.values() if "step" in state]
        return [*counts, *(tensor.detach() for tensor, _ in (*states.weights(), *states.optimizer_states()))]

    def windows(self, *args, **more):
        found, previous = self.loader(*args, **more), None
        for window in found:
            self.step += 1
            kept = window
            if any(step == self.step and kind != "slow" for step, _, kind, _ in self.faults):
                self.saved = [(tensor, tensor.clone()) for tensor in self.tensors()]
            if self.at("twice") is not None:
                window = previous
            elif self.at("missed") is not None:
                window = next(found)
                yield window
                self.step += 1
                window = kept
            if self.at("weight") is not None:
                self.flip(self.watched.states.weights())
            if self.at("state") is not None:
                self.flip(self.watched.states.optimizer_states())
            yield window
            previous = kept

    def restore(self) -> None:
        """Undo the step of a fault, on both ranks."""
        for tensor, then in self.saved:
            tensor.copy_(then)
        if self.saved:
            self.watched._forget()
            self.watched._keep()
        self.saved = []

    def write(self, file: str) -> None:
        if torch.distributed.get_rank() == 0:
            found = {"faults": self.faults, "said": self.said, "steps": self.step}
            Path(file).write_text(json.dumps(found))

    def watch(self, hook) -> None:
        """Wrap what the engine calls, around the extension's own wrapping."""
        self.watched, engine = hook.watch, hook.session.engine
        step, update, adam = engine.step, engine.optimizer.step, engine.basic_optimizer

        def engine_step(*args, **kwargs):
            if self.at("gradient") is not None:
                self.flip(self.watched.states.gradients())
            return step(*args, **kwargs)

        def optimizer_step(*args, **kwargs):
            variant = self.at("stale")
            if variant is not None and variant % 3 == 1:  # weights are written, but stay on their way
                before = [(tensor, tensor.detach().clone()) for tensor in self.stale_weights()]
            result = update(*args, **kwargs)
            if variant is not None and variant % 3 == 1:
                for tensor, then in before:
                    tensor.detach().copy_(then)
            if variant is not None and variant % 3 == 2:
                for tensor, then in zip(self.tensors(), self.older[0]):
                    tensor.copy_(then)
            near = any(kind == "stale" and 0 <= at - self.step <= 3 for at, _, kind, _ in self.faults)
            self.older = [*self.older[-1:], [tensor.clone() for tensor in self.tensors()]] if near else []
            return result

        def before(optimizer, *_):
            variant = self.at("stale")
            if variant is not None and variant % 3 == 0:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                tensors = [t for p in params for t in (p, *optimizer.state[p].values()) if torch.is_tensor(t)]
                self.held = [(t, t.detach().clone()) for t in tensors]

        def after(*_):
            for tensor, then in self.held:
                tensor.detach().copy_(then)
            self.held = []

        self.held, self.older = [], []
        adam.register_step_pre_hook(before)
        adam.register_step_post_hook(after)
        engine.step, engine.optimizer.step = engine_step, optimizer_step

    def stale_weights(self):
        states, own = self.watched.states, torch.distributed.get_rank()
        others = [part for parts in states.partitions for rank, part in enumerate(parts) if rank != own]
        return others or [tensor for tensor, _ in states.weights()]

    def model(self, forward):
        def slowed(model, batch, head):
            began = time.process_time()
            result = forward(model, batch, head)
            if self.at("slow") is not None:
                until = time.process_time() + 4 * (time.process_time() - began)
                while time.process_time() < until:
                    pass
            return result

        return slowed


def main() -> None:
    train = load_train()
    leave_no_model()
    loader, begin, after_step, forward = (
        sessions.windows, extension.Judge.begin, extension.Judge.after_step, LlavaModel.forward,
    )  # fmt: skip
    printed = extension.print_first
    for argv, plan, file in json.loads(Path(sys.argv[-1]).read_text()):
        corruption = Corruption(**plan)
        corruption.loader = loader

        def begin_watched(hook, corruption=corruption):
            begin(hook)
            corruption.watch(hook)

        def after(hook, end, corruption=corruption, file=file):
            after_step(hook, end)
            if end.problems:
                corruption.said[end.step] = "\n".join(end.problems)
                end.problems.clear()
                end.at_checkpoint = False
            corruption.restore()
            corruption.write(file)

        def say(line, *more, corruption=corruption):
            corruption.said[corruption.step] = line
            printed(line, *more)

        sessions.windows, LlavaModel.forward = corruption.windows, corruption.model(forward)
        extension.Judge.begin, extension.Judge.after_step, extension.print_first = begin_watched, after, say
        train.main(argv)
        corruption.write(file)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
