"""Measure fill and balance of packs, and the cost of planning: python run/dev/measure_packing.py

On the length mix of LLaVA-1.5's stage 2 (run/dev/benchmark/length_mix.py), 665,000 samples in random order.
fill: tokens / (packs * bound). balance: the mean rank's work / the slowest one's, round by round, in tokens.
least: the fill if packs could be filled to the last token, by the sizes of the steps alone.
"""

import argparse
import collections
import itertools
import math
import time

from benchmark.length_mix import FINETUNE, PRETRAIN, length_mix

from llava_ds.data import packing
from llava_ds.data.packing import plan_by_tokens
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import Packing


def fill_and_balance(
    steps: list[list[int]], lengths: list[int], dp: int, max_tokens: int, pair_cost: float = 0.0
) -> tuple[float, float, float]:
    """fill, its least upper bound by arithmetic, and balance of some steps."""
    tokens = packs = needed = work = slowest = 0
    for samples in steps:
        own = [lengths[i] for i in samples]
        cost = [int(n + pair_cost * n**2) for n in own]
        plan = plan_by_tokens(samples, own, dp, max_tokens, cost)
        costs = [[sum(lengths[i] + pair_cost * lengths[i] ** 2 for i in micro) for micro in rank] for rank in plan]
        tokens += sum(own)
        packs += dp * len(plan[0])
        needed += dp * math.ceil(sum(own) / (dp * max_tokens))
        work += sum(map(sum, costs)) / dp
        slowest += sum(max(together) for together in zip(*costs))
    return tokens / (packs * max_tokens), tokens / (needed * max_tokens), work / slowest


def padded_share(steps: list[list[int]], lengths: list[int], dp: int, micro_batch_size: int) -> tuple[float, float]:
    """Useful share of the tokens of padded micro-batches, one a rank and step, and where all wait for the longest."""
    tokens = padded = waited = 0
    for samples in steps:
        longest = [
            max(lengths[i] for i in samples[first : first + micro_batch_size])
            for first in range(0, dp * micro_batch_size, micro_batch_size)
        ]
        tokens += sum(lengths[i] for i in samples)
        padded += micro_batch_size * sum(longest)
        waited += micro_batch_size * dp * max(longest)
    return tokens / padded, tokens / waited


def measure_padding(num_samples: int) -> None:
    """Print the useful share of LLaVA-1.5's batches on 8 ranks: stage 2 in its sampler's order, stage 1 at random."""
    print("stage  batch   mean length   useful in padded batches   where ranks wait for the slowest")
    for stage, parts, micro_batch_size in ((2, FINETUNE, 16), (1, PRETRAIN, 32)):
        mix = length_mix(parts, num_samples, seed=0)
        signed = [n if images else -n for n, images in zip(mix.tokens.tolist(), mix.images)]
        batch, how = 8 * micro_batch_size, "modality" if stage == 2 else "random"
        order = SampleOrder(num_samples, batch, 0, how, signed, micro_batch_size)
        steps = list(itertools.islice(order.steps(), num_samples // batch))
        useful, with_waiting = padded_share(steps, mix.tokens.tolist(), 8, micro_batch_size)
        print(f"{stage:5} {batch:6} {mix.tokens.mean():13.0f} {useful:26.3f} {with_waiting:34.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_tokens", type=int, default=8192)
    parser.add_argument("--pair_cost", type=float, default=2e-5, help="that of a 7B model")
    parser.add_argument("--num_samples", type=int, default=665_000)
    parser.add_argument("--num_steps", type=int, default=100, help="of which fill and balance are taken")
    parser.add_argument("--plain", action="store_true", help="without the local search that evens packs out")
    parser.add_argument("--padded", action="store_true", help="measure the padding of LLaVA's recipes instead")
    args = parser.parse_args()
    if args.padded:
        measure_padding(args.num_samples)
        return
    if args.plain:
        packing._even = lambda *_: None
    lengths = length_mix(FINETUNE, args.num_samples, seed=0).tokens
    print("batch  ranks    fill   most by arithmetic   balance")
    for batch_size, dp in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8, 64)):
        order = SampleOrder(args.num_samples, batch_size, seed=0)
        steps = list(itertools.islice(order.steps(), args.num_steps))
        fill, most, balance = fill_and_balance(steps, lengths, dp, args.max_tokens, args.pair_cost)
        print(f"{batch_size:5} {dp:6} {fill:7.3f} {most:12.3f} {balance:17.4f}", flush=True)
    print("\nbatch  ranks   order, us a sample   planning, us a sample   (processor time, all samples)")
    for batch_size, dp in itertools.product((128, 1024), (1, 8)):
        order = SampleOrder(args.num_samples, batch_size, seed=0)
        layout = Packing(dp, batch_size // dp, 1, args.max_tokens, pair_cost=args.pair_cost)
        times = [time.process_time()]
        for steps in (order.steps(), layout.steps(order, lengths, 0)):
            collections.deque(itertools.islice(steps, order.steps_per_epoch), maxlen=0)
            times.append(time.process_time())
        alone, both = times[1] - times[0], times[2] - times[1]
        print(
            f"{batch_size:5} {dp:6} {alone / args.num_samples * 1e6:12.2f} "
            f"{(both - alone) / args.num_samples * 1e6:22.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
