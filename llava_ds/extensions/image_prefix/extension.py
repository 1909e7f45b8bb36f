"""Compute an image and other common first tokens once for all records of a step that begin with them."""

import itertools
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llava_ds.config.arguments import Arguments
from llava_ds.data.dataset import open_together
from llava_ds.extensions.base import Extension
from llava_ds.extensions.image_prefix.grouped_dataset import GroupedDataset
from llava_ds.geometry import ImageOptions
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.train.objectives.prompt_sharing import why_not
from llava_ds.train.plan import Plan

STEPS = 8  # number of steps whose shared tokens are counted
FEW = 0.01  # share of tokens below which sharing gains little


def fits(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield a line if the model or the flags don't allow records to share tokens."""
    if reason := why_not(args, config):
        yield f"--share_image_prefix True: {reason}: leave it out"


def open_grouped(
    args: Arguments, tokenizer: PreTrainedTokenizerBase, image_options: ImageOptions, ranks: Ranks
) -> GroupedDataset:
    """Open the training data, with the records of an image grouped."""
    plain = open_together(args, tokenizer, image_options, ranks)
    return GroupedDataset(plain, args.own["image_prefix"].group_by_image)


def note_shared(plan: Plan, ranks: Ranks) -> None:
    """Print which share of the tokens in the next steps is computed for several records at once."""
    dataset, layouts = plan.steps.dataset, list(itertools.islice(plan.steps.after(plan.resumed_step), STEPS))
    micro_batches = [micro for layout in layouts for rank in layout.of_ranks for micro in rank]
    tokens = sum(int(dataset.lengths[micro].sum()) for micro in micro_batches)
    part = 1 - sum(dataset.summed(dataset.lengths, micro) for micro in micro_batches) / max(1, tokens)
    line = f"records of one image share {part:.0%} of the tokens of the first {len(layouts)} steps"
    if part < FEW and not plan.args.own["image_prefix"].group_by_image:
        line += (
            ": too few for --share_image_prefix to help; --group_by_image True takes the records of an image together"
        )
    print_first(line)


extension = Extension(fits=fits, open_data=open_grouped, complete=note_shared)
