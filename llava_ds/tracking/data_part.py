"""The data on a run's page: the training data, the eval data, and the records that were left out."""

from llava_ds.data.preflight import reasons_in_short
from llava_ds.tracking.blocks import Block, charts, details, heading, note, pre, table
from llava_ds.tracking.chart import bar_chart
from llava_ds.tracking.run_files import RunFiles

MOST_REJECTED = 50
LEFT_OUT = "left out:"  # begins the reasons in EncodedDataset.summary


def data_part(run: RunFiles) -> list[Block]:
    """The summary of the data, the eval data, and what was left out before and during training."""
    data = run.record.get("data")
    data = data if isinstance(data, dict) else {}
    summary, lengths = data.get("summary"), data.get("lengths")
    blocks: list[Block] = []
    if isinstance(summary, list):
        lines = list(map(str, summary))
        if LEFT_OUT in lines and run.skipped:  # which has a part of its own
            lines = lines[: lines.index(LEFT_OUT)]
        blocks.append(pre("\n".join(lines)))
    if isinstance(lengths, dict) and isinstance(lengths.get("edges"), list) and isinstance(lengths.get("counts"), list):
        unit = "tokens, image features included"
        blocks.append(charts([bar_chart("Samples by length", lengths["edges"], lengths["counts"], unit)]))
    if not blocks:
        blocks.append(note("run.json says nothing about the data."))
    return [*blocks, *_eval_data(run, data.get("held_out")), *_rejected(run), *_skipped_steps(run)]


def _eval_data(run: RunFiles, summary: object) -> list[Block]:
    """summary: run.json's lines about it, without which nothing is said."""
    if not isinstance(summary, list):
        return []
    blocks = [heading("Held out"), pre("\n".join(map(str, summary)))]
    if not summary:
        blocks[1] = note("Nothing: neither --eval_fraction nor --eval_data_path was given.", "note")
    broken = (run.column("broken_samples", run.evals)[1] or [0])[-1]
    if broken:
        blocks.append(note(f"Held-out samples that broke, at the last measurement: {broken:,.0f}.", "warn"))
    return blocks


def _rejected(run: RunFiles) -> list[Block]:
    if "skipped.jsonl" in run.problems:
        return [note(run.problems["skipped.jsonl"], "warn")]
    if not run.skipped:
        return [note("No record was rejected.", "note")]
    rows = [
        (
            f"{row.get('file')}:{row.get('line')}",
            row.get("id"),
            f"broke at step {row['step']}" if row.get("step") else "before training",
            row.get("reason"),
        )
        for row in run.skipped[:MOST_REJECTED]
    ]
    listing = [table(["where", "id", "when", "why"], rows, stacks=True)]
    if more := len(run.skipped) - len(rows):
        listing.append(note(f"{more:,} more are in skipped.jsonl.", "note"))
    reasons = reasons_in_short([str(row.get("reason")) for row in run.skipped])
    count = f"Records left out: {len(run.skipped):,}"
    return [heading("Left out"), pre("\n".join(reasons)), details(count, *listing)]


def _skipped_steps(run: RunFiles) -> list[Block]:
    if not run.skipped_steps:
        return []
    rows = [
        (f"{row['step']:,}", row.get("not_finite"), ", ".join(map(str, (row.get("samples") or [])[:8])))
        for row in run.skipped_steps[:MOST_REJECTED]
    ]
    count = f"Steps that changed nothing, for they were not finite: {len(run.skipped_steps):,}"
    return [details(count, table(["step", "what", "samples"], rows, numbers=(0,)))]
