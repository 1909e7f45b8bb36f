"""Register --stream: open data that are still being encoded, and write their records at the end of the run."""

from llava_ds.data.file_slices import write_errors
from llava_ds.data.seen_files import write_data_files
from llava_ds.extensions.base import Extension, Hook, Phase
from llava_ds.extensions.streaming.streamed_dataset import StreamedDataset, open_streamed
from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import broadcast_from_first, print_first
from llava_ds.tracking.run_record import complete_run_record, data_record


class WriteRecords(Hook):
    """Writes skipped.jsonl, run.json's data and the list of files at the end, instead of at the start of the run."""

    def close(self) -> None:
        """Wait for the encoding to end, then write after training's last line in skipped.jsonl, before the report."""
        session, plan = self.session, self.session.plan
        if session.state.stops:
            return
        whole, dataset = plan.steps.dataset.encoded(session.ranks)
        held_out = plan.evals.eval_set
        if isinstance(held_out, StreamedDataset):
            _, held_out = held_out.encoded(session.ranks)

        def write() -> None:
            rejections, path = list(whole.rejections()), plan.run_folder / "skipped.jsonl"
            rejected = {(row["file"], row["index"]) for row in rejections}
            # Replace the lines with a step that training wrote for rejected records.
            broken = [row for row in rows_of(path) if (row["file"], row["index"]) not in rejected]
            RowLog(path, [*rejections, *broken])
            with write_errors(plan.output_dir, "the record of the run", "--output_dir"):
                complete_run_record(plan.output_dir, data_record(plan.args, dataset, held_out))
                write_data_files(plan.run_folder, whole.table)

        broadcast_from_first(session.ranks, write)
        print_first(*dataset.summary())


extension = Extension(open_data=open_streamed, hooks=((Phase.LOG, WriteRecords),))
