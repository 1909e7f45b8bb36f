"""report.html: one self-contained page about a run and its result."""

import json
import shlex
import time
from pathlib import Path

from llava_ds.config.arguments import flag_default
from llava_ds.data.encoded_rows import reasons_in_short
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.extensions.active import report_parts
from llava_ds.files.writing import write_output, write_whole
from llava_ds.tracking.blocks import Block, charts, details, heading, note, pre, render, styled, table, tiles
from llava_ds.tracking.chart import bar_chart
from llava_ds.tracking.curves import learning_curves, machine_curves, objective_curves
from llava_ds.tracking.run_files import RunFiles, read_run
from llava_ds.tracking.series import is_number
from llava_ds.tracking.wording import NUMBERS, model_of, num_bytes

FILE = "report.html"
HOW = "python run/evaluate.py --model_path {folder} --compare_without_image --output {folder}/evaluation.json"
MOST_REJECTED = 50  # maximum rows in the tables of rejected records and skipped steps
LEFT_OUT = "left out:"  # prefix of the reasons in EncodedDataset.summary


def report_at_end(output_dir: Path) -> None:
    """Write the report of a finished run, and print its path. An error is printed as a warning."""
    try:
        print(f"report: {write_report(output_dir)}", flush=True)
    except Exception as error:  # usually a full disk
        print(
            f"WARNING: {output_dir / FILE} could not be written ({type(error).__name__}: {error}): "
            "python run/report.py can write it later",
            flush=True,
        )


def write_report(output_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a finished, killed or running run from the files in its folder. Returns its path.

    path: --html's file, or None for report.html in the folder. If it can't be written, raises ConfigError or OSError.
    """
    page = report_page(read_run(output_dir))
    if path is None:
        path = output_dir / FILE
        write_whole(path, page)
    else:
        write_output(path, page, "--html")
    return path


def _evaluations(run: RunFiles) -> tuple[Block, dict[str, list[Block]]]:
    """Return the card at the top (the scores, or the command to compute them), and sections about the evaluations."""
    if not run.evaluations:
        return _not_evaluated(run), {}
    from llava_ds.tracking.mistakes import mistakes_part
    from llava_ds.tracking.result import evaluation_part, result_card

    return result_card(run) or _not_evaluated(run), {"Mistakes": mistakes_part(run), "Evaluation": evaluation_part(run)}


def _not_evaluated(run: RunFiles) -> Block:
    if run.flags.get("tune_mm_mlp_adapter"):
        return note("Stage 1 trains only a projector: score the model after stage 2, trained on top of it.", "note")
    text = "Not evaluated yet. This scores the model with and without the image, and puts it here:"
    return {"kind": "no_result", "blocks": [note(text, "note"), pre(HOW.format(folder=run.output_dir))]}


def report_page(run: RunFiles) -> str:
    """Return the page as HTML: first the result of the run, then learning, then the machine."""
    card, evaluations = _evaluations(run)
    sections = {
        "Mistakes": evaluations.get("Mistakes", []),
        "Learning": learning_curves(run),
        "Objective": objective_curves(run),
        "Evaluation": evaluations.get("Evaluation", []),
        "Data": _data(run),
        "The machine": [tiles(_figures(run, MACHINE)), *machine_curves(run)],
        "Configuration": [*_flags(run), *_deepspeed(run)],
        "Checkpoints": _checkpoints(run),
        "To repeat it": _command(run),
    }
    parts = report_parts(run)
    added = {title: blocks for part in parts for title, blocks in part.sections().items()}
    sections = {**added, **{title: [*added.get(title, ()), *blocks] for title, blocks in sections.items()}}
    is_over = any(part.is_over for part in parts)
    left_out = [(f"{len(run.skipped):,}", "records left out")] if run.skipped and run.numbers else []
    planned, steps = run.record.get("num_steps"), int(run.numbers.get("steps", 0))
    done = (is_number(planned) and steps >= planned) or is_over
    when = (
        f"started {run.record['started']}" if run.record.get("started") else "",
        f"on {run.record['world_size']} × {run.record.get('device')}" if run.record.get("world_size") else "",
    )
    return render(
        "report.html.j2",
        title=f"{run.name}: report",
        name=run.name,
        lead=model_of(run) if run.flags else "",
        done=done,
        state=_state(steps, planned, done, is_over),
        when=" · ".join(filter(None, when)),
        problems=[note(run.problems[name], "warn") for name in ("run.json", "metrics.jsonl") if name in run.problems],
        first=[card, tiles([*_figures(run, LEARNING), *left_out])],
        sections={title: blocks for title, blocks in sections.items() if blocks},
        written=time.strftime("%Y-%m-%d %H:%M %z"),
        folder=run.output_dir.resolve(),
    )


def _state(steps: int, planned: object, done: bool, is_over: bool) -> str:
    if done and not is_over:
        return "finished"
    of = f" of {planned:,}" if is_number(planned) else ""
    return f"{'finished ' if done else ''}at step {steps:,}{of}"


LEARNING = (
    "loss", "held_out_loss", "steps", "epoch", "samples", "tokens", "step_time_s", "skipped_steps", "broken_samples",
)  # fmt: skip
MACHINE = ("tokens_per_s", "mfu", "wait", "peak_memory_bytes")


def _figures(run: RunFiles, wanted: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (number, label) for the wanted numbers that the run has; counts of problems only if not zero."""
    numbers, problems = run.numbers, ("skipped_steps", "broken_samples")
    found = [name for name in wanted if name in numbers and (numbers[name] or name not in problems)]
    return [(NUMBERS[name].form(numbers[name]), NUMBERS[name].label) for name in found]


def _data(run: RunFiles) -> list[Block]:
    """Describe the training data, the eval data, and the samples left out before and during training."""
    data = run.record.get("data")
    data = data if isinstance(data, dict) else {}
    summary, lengths = data.get("summary"), data.get("lengths")
    blocks: list[Block] = []
    if isinstance(summary, list):
        lines = list(map(str, summary))
        if LEFT_OUT in lines and run.skipped:  # the section "Left out" lists them
            lines = lines[: lines.index(LEFT_OUT)]
        blocks.append(pre("\n".join(lines)))
    if isinstance(lengths, dict) and isinstance(lengths.get("edges"), list) and isinstance(lengths.get("counts"), list):
        unit = "tokens, image features included"
        blocks.append(charts([bar_chart("Samples by length", lengths["edges"], lengths["counts"], unit)]))
    if not blocks:
        blocks.append(note("run.json has no entries about the data."))
    return [*blocks, *_eval_data(run, data.get("held_out")), *_rejected(run), *_skipped_steps(run)]


def _eval_data(run: RunFiles, summary: object) -> list[Block]:
    """Return blocks about the eval data. summary: lines about it from run.json; empty result if that is no list."""
    if not isinstance(summary, list):
        return []
    blocks = [heading("Held out"), pre("\n".join(map(str, summary)))]
    if not summary:
        blocks[1] = note("Nothing: give --eval_fraction or --eval_data_path to hold out samples.", "note")
    broken = (run.column("broken_samples", run.evals)[1] or [0])[-1]
    if broken:
        blocks.append(note(f"Held-out samples that broke in the last evaluation: {broken:,.0f}.", "warn"))
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
    count = f"Steps skipped because their loss or gradients were not finite: {len(run.skipped_steps):,}"
    return [details(count, table(["step", "what", "samples"], rows, numbers=(0,)))]


def _flags(run: RunFiles) -> list[Block]:
    if not run.flags:
        return [note("run.json has no flags.")]
    given = set(run.record.get("given") or ())
    chosen, others = [], []
    for name, value in run.flags.items():
        why, rows = "filled in from the model, the DeepSpeed JSON or the shipped defaults", chosen
        if name in given:
            why = styled("given", "given")
        elif value == flag_default(name):
            why, rows = "default", others
        rows.append((f"--{name}", _code(value), why))
    head = ["flag", "value", "why"]
    return [
        heading("Flags"),
        table(head, chosen, stacks=True) if chosen else note("All are at their defaults."),
        details(f"{len(others)} flags at their defaults", table(head, others, stacks=True)),
    ]


def _deepspeed(run: RunFiles) -> list[Block]:
    if "ds_config.json" in run.problems:
        return [heading("DeepSpeed"), note(run.problems["ds_config.json"], "warn")]
    reasons = run.record.get("ds_config_reasons")
    reasons = reasons if isinstance(reasons, dict) else {}
    rows = [(key, _code(value_at(run.ds_config, key)), why) for key, why in reasons.items()]
    filled = table(["key", "value", "why"], rows, stacks=True)
    return [
        heading("DeepSpeed: values filled in"),
        filled if rows else note("run.json has no reasons for filled-in values."),
        details("ds_config.json, as passed to DeepSpeed", pre(json.dumps(run.ds_config, indent=2))),
    ]


def _code(value: object) -> object:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return styled(text, "code") if text != "" else ""


def _checkpoints(run: RunFiles) -> list[Block]:
    if not run.checkpoints:
        return [note("No checkpoints in this folder.")]
    rows = []
    for one in run.checkpoints:
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.saved_s))
        problem = "" if one.whole else "no manifest: incomplete, not used"
        rows.append((one.name, num_bytes(one.num_bytes), saved, problem))
    return [
        table(["checkpoint", "size", "saved", ""], rows, numbers=(1,)),
        note("python run/verify.py reads every file and compares its hash.", "note"),
    ]


def _command(run: RunFiles) -> list[Block]:
    command, ranks = run.record.get("command"), run.record.get("world_size")
    if not isinstance(command, list):
        return [note("run.json does not say how the run was started.")]
    launcher = ["deepspeed"]
    if is_number(ranks):
        launcher += ["--num_accelerators" if run.record.get("device") == "cpu" else "--num_gpus", str(ranks)]
    given = [str(word) for word in command if not str(word).startswith("--local_rank=")]  # added by the launcher
    begins = [i for i, word in enumerate(given) if word.startswith("--")]
    flags = [shlex.join(given[i:j]) for i, j in zip(begins, [*begins[1:], len(given)])]
    lines = [shlex.join([*launcher, *given[: begins[0] if begins else None]]), *flags]
    folder = [f"cd {shlex.quote(str(run.record['folder']))}"] if run.record.get("folder") else []
    blocks = [pre("\n".join([*folder, " \\\n  ".join(lines)]))]
    notes = ["On several machines: use their launcher, with as many ranks."] if is_number(ranks) and ranks > 8 else []
    if str(run.record.get("git_revision")).endswith("+"):
        notes.append("The source had uncommitted changes.")
    if notes:
        blocks.append(note(" ".join(notes), "note"))
    versions = run.record.get("versions")
    rows = list(versions.items()) if isinstance(versions, dict) else []
    if run.record.get("git_revision"):
        rows.append(("source revision", run.record["git_revision"]))
    return [*blocks, table(["package", "version"], rows)] if rows else blocks
