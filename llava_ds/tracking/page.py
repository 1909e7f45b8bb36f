"""report.html: one page, whole in itself, about a run and its result."""

import dataclasses
import json
import shlex
import time
from pathlib import Path

from llava_ds.config.arguments import DataArguments, ModelArguments, TrainingArguments
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.files.writing import write_output, write_whole
from llava_ds.tracking.blocks import Block, details, heading, note, pre, render, styled, table, tiles
from llava_ds.tracking.chart import short
from llava_ds.tracking.curves import learning_curves, machine_curves
from llava_ds.tracking.data_part import data_part
from llava_ds.tracking.mistakes import mistakes_part
from llava_ds.tracking.result import evaluation_part, result_card
from llava_ds.tracking.run_files import RunFiles, is_number, read_run
from llava_ds.tracking.sampled import sampled_answers
from llava_ds.tracking.wording import duration, model_of, num_bytes

FILE = "report.html"


def leave_report(output_dir: Path) -> None:
    """Write the report of a run that ends, and say where it is. A run is not lost over its report."""
    try:
        print(f"report: {write_report(output_dir)}", flush=True)
    except Exception as error:  # a disk that is full, as a rule
        print(
            f"WARNING: {output_dir / FILE} could not be written ({type(error).__name__}: {error}): "
            "python run/report.py writes it later",
            flush=True,
        )


def write_report(output_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a run that ended, was killed, or is running, from what lies in its folder. Returns its path.

    path: of --html, which ConfigError names if it can't be written; absent, report.html in that folder (OSError).
    """
    page = report_page(read_run(output_dir))
    if path is None:
        path = output_dir / FILE
        write_whole(path, page)
    else:
        write_output(path, page, "--html")
    return path


def report_page(run: RunFiles) -> str:
    """The page, as HTML: the result of the run first, then how it learnt, then what the machine did."""
    sections = {
        "Answers while training": _answers(run),
        "Mistakes": mistakes_part(run),
        "Learning": learning_curves(run),
        "Evaluation": evaluation_part(run),
        "Data": data_part(run),
        "The machine": [tiles(_figures(run, MACHINE)), *machine_curves(run)],
        "Configuration": [*_flags(run), *_deepspeed(run)],
        "Checkpoints": _checkpoints(run),
        "To repeat it": _command(run),
    }
    planned, steps = run.record.get("num_steps"), int(run.numbers.get("steps", 0))
    done = is_number(planned) and steps >= planned
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
        state="finished" if done else f"at step {steps:,}" + (f" of {planned:,}" if is_number(planned) else ""),
        when=" · ".join(filter(None, when)),
        problems=[note(run.problems[name], "warn") for name in ("run.json", "metrics.jsonl") if name in run.problems],
        first=[result_card(run), tiles(_figures(run, LEARNING))],
        sections={title: blocks for title, blocks in sections.items() if blocks},
        written=time.strftime("%Y-%m-%d %H:%M %z"),
        folder=run.output_dir.resolve(),
    )


# Numbers of a run: name, label and format.
LEARNING = (
    ("loss", "loss at the end (running mean)", "{:.4f}".format),
    ("held_out_loss", "eval loss, last", "{:.4f}".format),
    ("steps", "optimizer steps", "{:,.0f}".format),
    ("epoch", "epochs", "{:.2f}".format),
    ("samples", "samples", "{:,.0f}".format),
    ("tokens", "tokens", short),
    ("step_time_s", "spent in steps", duration),
    ("skipped_steps", "steps skipped (not finite)", "{:,.0f}".format),
    ("broken_samples", "samples that broke", "{:,.0f}".format),
    ("left_out", "records left out", "{:,.0f}".format),
)
MACHINE = (
    ("tokens_per_s", "tokens/s (median)", "{:,.0f}".format),
    ("mfu", "of the peak: MFU (median)", "{:.1%}".format),
    ("wait", "of the time waiting for data", "{:.1%}".format),
    ("peak_memory_bytes", "peak memory of rank 0", num_bytes),
)


def _figures(run: RunFiles, wanted: tuple) -> list[tuple[str, str]]:
    """(number, label) of those that the run has; of problems only if there were some."""
    numbers = {
        name: value for name, value in run.numbers.items() if value or name not in ("skipped_steps", "broken_samples")
    }
    numbers |= {"left_out": len(run.skipped)} if run.skipped and numbers else {}
    return [(form(numbers[name]), label) for name, label, form in wanted if numbers.get(name) is not None]


def _answers(run: RunFiles) -> list[Block]:
    if "samples.jsonl" in run.problems:
        return [note(run.problems["samples.jsonl"], "warn")]
    return sampled_answers(run.samples, run.output_dir) if run.samples else []


def _flags(run: RunFiles) -> list[Block]:
    if not run.flags:
        return [note("run.json says nothing about the flags.")]
    given = set(run.record.get("given") or ())
    defaults = {
        f.name: f.default for cls in (ModelArguments, DataArguments, TrainingArguments) for f in dataclasses.fields(cls)
    }
    chosen, others = [], []
    for name, value in run.flags.items():
        if name in given:
            chosen.append((f"--{name}", _code(value), styled("given", "given")))
        elif value != defaults.get(name):
            chosen.append(
                (f"--{name}", _code(value), "filled in: from the model, the DeepSpeed JSON or what is shipped")
            )
        else:
            others.append((f"--{name}", _code(value), "default"))
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
        heading("DeepSpeed: what was filled in"),
        filled if rows else note("run.json has no reasons for what was filled in."),
        details("ds_config.json, as DeepSpeed was given it", pre(json.dumps(run.ds_config, indent=2))),
    ]


def _code(value: object) -> object:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return styled(text, "code") if text != "" else ""


def _checkpoints(run: RunFiles) -> list[Block]:
    if not run.checkpoints:
        return [note("There are no checkpoints here.")]
    rows = [
        (
            one.name,
            num_bytes(one.num_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.saved_s)),
            "" if one.whole else "no manifest: it does not count",
        )
        for one in run.checkpoints
    ]
    return [
        table(["checkpoint", "size", "saved", ""], rows, numbers=(1,)),
        note("python run/verify.py reads them whole and compares every hash.", "note"),
    ]


def _command(run: RunFiles) -> list[Block]:
    command, ranks = run.record.get("command"), run.record.get("world_size")
    if not isinstance(command, list):
        return [note("run.json does not say how the run was started.")]
    launcher = ["deepspeed"]
    if is_number(ranks):
        launcher += ["--num_accelerators" if run.record.get("device") == "cpu" else "--num_gpus", str(ranks)]
    given = [str(word) for word in command if not str(word).startswith("--local_rank=")]  # which the launcher adds
    begins = [i for i, word in enumerate(given) if word.startswith("--")]
    flags = [shlex.join(given[i:j]) for i, j in zip(begins, [*begins[1:], len(given)])]
    lines = [shlex.join([*launcher, *given[: begins[0] if begins else None]]), *flags]
    folder = [f"cd {shlex.quote(str(run.record['folder']))}"] if run.record.get("folder") else []
    blocks = [pre("\n".join([*folder, " \\\n  ".join(lines)]))]
    notes = ["On several machines: with their launcher, and as many ranks."] if is_number(ranks) and ranks > 8 else []
    if str(run.record.get("git_revision")).endswith("+"):
        notes.append("The source had changes that no commit has.")
    if notes:
        blocks.append(note(" ".join(notes), "note"))
    versions = run.record.get("versions")
    rows = list(versions.items()) if isinstance(versions, dict) else []
    if run.record.get("git_revision"):
        rows.append(("source revision", run.record["git_revision"]))
    return [*blocks, table(["package", "version"], rows)] if rows else blocks
