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

from benchmark.length_mix import FINETUNE, length_mix

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
        plan = plan_by_tokens([(i,) for i in samples], own, dp, max_tokens, cost)
        costs = [[sum(lengths[i] + pair_cost * lengths[i] ** 2 for i in micro) for micro in rank] for rank in plan]
        tokens += sum(own)
        packs += dp * len(plan[0])
        needed += dp * math.ceil(sum(own) / (dp * max_tokens))
        work += sum(map(sum, costs)) / dp
        slowest += sum(max(together) for together in zip(*costs))
    return tokens / (packs * max_tokens), tokens / (needed * max_tokens), work / slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_tokens", type=int, default=8192)
    parser.add_argument("--pair_cost", type=float, default=2e-5, help="that of a 7B model")
    parser.add_argument("--num_samples", type=int, default=665_000)
    parser.add_argument("--num_steps", type=int, default=100, help="of which fill and balance are taken")
    parser.add_argument("--plain", action="store_true", help="without the local search that evens packs out")
    args = parser.parse_args()
    if args.plain:
        packing._even = lambda *_: None
    lengths = length_mix(FINETUNE, args.num_samples, seed=0).tokens.tolist()
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
