"""The data of a run's page: what was trained on, what was held out, and what was left out."""

from llava_ds.data.preflight import reasons_in_short
from llava_ds.tracking.chart import bar_chart
from llava_ds.tracking.markup import details, esc, sentence, table
from llava_ds.tracking.run_files import RunFiles

MOST_REJECTED = 50
LEFT_OUT = "left out:"  # begins the reasons in EncodedDataset.summary


def data_part(run: RunFiles) -> str:
    """Its summary, what is held out, and what was left out before and while it trained, as HTML."""
    data = run.record.get("data")
    data = data if isinstance(data, dict) else {}
    summary, lengths = data.get("summary"), data.get("lengths")
    parts = []
    if isinstance(summary, list):
        told = list(map(str, summary))
        if LEFT_OUT in told and run.skipped:  # which has a part of its own
            told = told[: told.index(LEFT_OUT)]
        parts.append(f"<pre>{esc(chr(10).join(told))}</pre>")
    if isinstance(lengths, dict) and isinstance(lengths.get("edges"), list) and isinstance(lengths.get("counts"), list):
        chart = bar_chart("Samples by length", lengths["edges"], lengths["counts"], "tokens, image features included")
        parts.append(f'<div class="charts">{chart}</div>')
    if not parts:
        parts.append(sentence("run.json says nothing about the data."))
    return "".join(parts) + _held_out(run, data.get("held_out")) + _rejected(run) + _skipped_steps(run)


def _held_out(run: RunFiles, summary: object) -> str:
    """summary: run.json's lines about it, without which nothing is said."""
    if not isinstance(summary, list):
        return ""
    broken = (run.column("broken_samples", run.evals)[1] or [0])[-1]
    told = sentence(f"Held-out samples that broke, at the last measurement: {broken:,.0f}.", "warn") if broken else ""
    lines = f"<pre>{esc(chr(10).join(map(str, summary)))}</pre>"
    nothing = sentence("Nothing: neither --eval_fraction nor --eval_data_path was given.", "note")
    return "<h3>Held out</h3>" + (lines if summary else nothing) + told


def _rejected(run: RunFiles) -> str:
    if "skipped.jsonl" in run.problems:
        return sentence(run.problems["skipped.jsonl"], "warn")
    if not run.skipped:
        return sentence("No record was rejected.", "note")
    reasons = reasons_in_short([str(row.get("reason")) for row in run.skipped])
    rows = [
        (
            f"{row.get('file')}:{row.get('line')}",
            row.get("id"),
            f"broke at step {row['step']}" if row.get("step") else "before training",
            row.get("reason"),
        )
        for row in run.skipped[:MOST_REJECTED]
    ]
    more = len(run.skipped) - len(rows)
    note = sentence(f"{more:,} more are in skipped.jsonl.", "note") if more else ""
    listing = details(
        f"Records left out: {len(run.skipped):,}", table(["where", "id", "when", "why"], rows, stacks=True) + note
    )
    return f"<h3>Left out</h3><pre>{esc(chr(10).join(reasons))}</pre>{listing}"


def _skipped_steps(run: RunFiles) -> str:
    if not run.skipped_steps:
        return ""
    rows = [
        (f"{row['step']:,}", row.get("not_finite"), ", ".join(map(str, (row.get("samples") or [])[:8])))
        for row in run.skipped_steps[:MOST_REJECTED]
    ]
    return details(
        f"Steps that changed nothing, for they were not finite: {len(run.skipped_steps):,}",
        table(["step", "what", "samples"], rows, numbers=(0,)),
    )
