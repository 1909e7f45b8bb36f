"""README.md of an exported folder: what the model is, what it was trained on and how, and how to open it."""

import json
from pathlib import Path

from typing_extensions import TypedDict

from llava_ds.arguments import Arguments, trained_parts
from llava_ds.redact import redact
from llava_ds.side_files import read_rows

# Flags that a reader of a model card asks for; paths are no such.
SHOWN = (
    "version", "mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "image_aspect_ratio",
    "mm_patch_merge_type", "model_max_length", "learning_rate", "mm_projector_lr", "mm_vision_tower_lr",
    "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "bf16", "fp16", "loss_reduction", "seed",
)  # fmt: skip

OPEN_HF = """\
```python
from transformers import AutoProcessor, {cls}

model = {cls}.from_pretrained("{folder}")
processor = AutoProcessor.from_pretrained("{folder}")
```
"""
OPEN_LLAVA = """\
```python
from llava.model.builder import load_pretrained_model

tokenizer, model, image_processor, context_len = load_pretrained_model("{folder}", None, "{name}")
```
"""


class _Row(TypedDict):
    """Of a row of metrics.jsonl what a card adds up."""

    step: int
    epoch: float
    loss: float
    samples: int
    tokens: int
    supervised_tokens: int


def write_card(
    output_dir: Path, form: str, args: Arguments, run_dir: Path, record: dict, step: int | None = None
) -> None:
    """Write README.md. run_dir: where metrics.jsonl and, if there is one, evaluation.json lie; record: run.json; step:
    of the checkpoint, None for the last.

    Names of models and data sets are the last parts of their paths: the rest is this machine's.
    """
    model, flags = args.model, args.as_dict()
    name = output_dir.resolve().name
    base = Path(model.model_name_or_path).name
    tower = (
        "its own vision tower" if model.vision_tower is None else f"the vision tower {Path(model.vision_tower).name}"
    )
    data = Path(args.data.data_path).name if args.data.data_path is not None else "generated scenes"
    lines = [
        "---",
        "tags: [llava, image-text-to-text]",
        f"library_name: {'transformers' if form == 'hf' else 'llava'}",
        "pipeline_tag: image-text-to-text",
        "---",
        "",
        f"# {name}",
        "",
        f"{base} with {tower}, trained with llava_ds on {data}.",
        "",
        *_numbers(run_dir, record, step),
        f"- trained: {', '.join(sorted(trained_parts(model)))}",
        "",
        "| flag | value |",
        "| --- | --- |",
        *(f"| `--{flag}` | {flags[flag]} |" for flag in SHOWN if flags[flag] is not None),
        "",
        "| package | version |",
        "| --- | --- |",
        *(f"| {package} | {version} |" for package, version in record["versions"].items()),
        "",
        *(_scores(run_dir / "evaluation.json") if step is None else []),
        *([] if form == "projector" else ["## Opening it", "", _opening(output_dir, form, name)]),
    ]
    (output_dir / "README.md").write_text(redact("\n".join(lines)), encoding="utf-8")


def write_conversion_card(output_dir: Path, form: str, source: Path) -> None:
    """Write README.md of a folder that was another format before."""
    name = output_dir.resolve().name
    text = f"# {name}\n\n{source.resolve().name}, converted by llava_ds.\n\n"
    opening = "" if form == "projector" else f"## Opening it\n\n{_opening(output_dir, form, name)}"
    (output_dir / "README.md").write_text(text + opening, encoding="utf-8")


def _numbers(run_dir: Path, record: dict, step: int | None) -> list[str]:
    path = run_dir / "metrics.jsonl"
    rows, _ = read_rows(path, _Row) if path.is_file() else ([], [])
    rows = [row for row in rows if step is None or row["step"] <= step]
    if not rows:
        return [f"- optimizer steps: {record['num_steps']:,}"]
    total = {key: sum(row[key] for row in rows) for key in ("samples", "tokens", "supervised_tokens")}
    return [
        f"- optimizer steps: {rows[-1]['step']:,} of {record['num_steps']:,}, {rows[-1]['epoch']:.2f} epochs",
        f"- samples: {total['samples']:,}",
        f"- tokens: {total['tokens']:,}, {total['supervised_tokens']:,} of them supervised",
        f"- loss at the end: {rows[-1]['loss']:.4f}",
    ]


def _scores(path: Path) -> list[str]:
    """What run/evaluate.py --output wrote there."""
    if not path.is_file():
        return []
    written = json.loads(path.read_text(encoding="utf-8"))
    scores = written["scores"]
    names = list(scores)
    kinds = list(scores[names[0]])
    rows = [[kind, *(f"{scores[n][kind][0] / scores[n][kind][1]:.3f}" for n in names)] for kind in kinds]
    table = [[written.get("metric", "accuracy"), *names], ["---"] * (1 + len(names)), *rows]
    return ["## Evaluation", "", *(f"| {' | '.join(row)} |" for row in table), ""]


def _opening(output_dir: Path, form: str, name: str) -> str:
    if form == "llava":
        return OPEN_LLAVA.format(folder=name, name=name if "llava" in name.lower() else f"llava-{name}")
    config = json.loads((output_dir / "config.json").read_text(encoding="utf-8"))
    return OPEN_HF.format(cls=config["architectures"][0], folder=name)
