"""The books of a run with --stream, which it can close only when all its data are encoded."""

from llava_ds.data.file_slices import write_errors
from llava_ds.data.seen_files import write_data_files
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.tracking.run_record import complete_run_record, data_record
from llava_ds.tracking.skipped_samples import SkippedSamples
from llava_ds.train.plan import Plan


def write_data_books(plan: Plan, skipped: SkippedSamples, ranks: Ranks) -> None:
    """Wait for the encoding to end, and write of the data what a run does at its start that has checked all of it.

    That is skipped.jsonl, the data in run.json, and the list of files. All ranks call it together.
    """
    whole, dataset = plan.steps.dataset.encoded(ranks)
    held_out = plan.evals.eval_set
    if held_out is not None and held_out.is_streamed:
        _, held_out = held_out.encoded(ranks)
    skipped.settle(whole.rejections())

    def write() -> None:
        with write_errors(plan.output_dir, "what the run is", "--output_dir"):
            complete_run_record(plan.output_dir, data_record(plan.args, dataset, held_out))
            write_data_files(plan.output_dir, whole.table)

    broadcast_from_first(ranks, write)
    print_first(*dataset.summary())
