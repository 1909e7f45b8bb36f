"""All that a run writes of itself while it trains, opened where it begins or goes on."""

from pathlib import Path

from llava_ds.config.arguments import Arguments
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import Layout
from llava_ds.data.sample_order import SampleOrder
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.model.flops import ModelFlops
from llava_ds.runtime.ranks import Ranks, print_first
from llava_ds.tracking.eval_log import Evals
from llava_ds.tracking.peak import peak_flops
from llava_ds.tracking.progress import Progress
from llava_ds.tracking.trackers import called, open_trackers
from llava_ds.train.loss_spikes import LossSpikes
from llava_ds.train.skipped_samples import SkippedLog
from llava_ds.train.skipped_steps import SkippedSteps


def start_progress(
    args: Arguments,
    engine,
    resolved: ResolvedConfig,
    dataset: EncodedDataset,
    layout: Layout,
    order: SampleOrder,
    flops: ModelFlops,
    *,
    resume_step: int,
    num_steps: int,
    ranks: Ranks,
) -> tuple[Progress, Evals]:
    """What the loop tells its steps to, and what evaluation tells its results to. All ranks call it together.

    Lines of an earlier start that lie behind resume_step are dropped everywhere, for they will come again.
    """
    training, output_dir = args.training, Path(args.training.output_dir)
    allowed = 0 if args.data.on_bad_sample == "stop" else args.data.max_bad_fraction * dataset.num_records
    peak, line = peak_flops(ranks.device, resolved.compute_dtype)
    print_first(line)
    trackers = open_trackers(args, output_dir, resume_step, num_steps, ranks)
    before = (resume_step, engine.skipped_steps)
    skipped = SkippedLog(output_dir / "skipped.jsonl", dataset.rejections(), allowed, resume_step, ranks)
    skipped_steps = SkippedSteps(output_dir, dataset, layout, order, training.max_skipped_steps, before, ranks)
    spikes = LossSpikes(output_dir, dataset, layout, order, training, resume_step, ranks)
    progress = Progress(
        output_dir,
        title=f"{called(args)}: {num_steps} steps, ZeRO-{resolved.zero_stage}, {ranks.world_size} ranks",
        resume_step=resume_step,
        max_steps=num_steps,
        steps_per_epoch=layout.steps_per_epoch(order),
        batch_size=layout.batch_size,
        logging_steps=training.logging_steps,
        sources=dataset.sources,
        flops=flops,
        peak_flops=peak,
        skipped=skipped,
        skipped_steps=skipped_steps,
        spikes=spikes,
        ranks=ranks,
        monitor=engine.monitor,
        trackers=trackers,
    )
    return progress, Evals(output_dir, resume_step, ranks, trackers)
