"""README.md of an exported folder: the model, its training, its scores, and how to use it."""

import json
import re
from dataclasses import replace
from pathlib import Path

from llava_ds.config.arguments import Arguments, adapted_parts, trained_parts
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import DataError
from llava_ds.extensions.active import choice, report_parts
from llava_ds.files.model_files import own_file
from llava_ds.files.reading import read_bytes
from llava_ds.files.writing import write_whole
from llava_ds.runtime.redact import redact
from llava_ds.tracking.run_files import read_run

CARD = "README.md"
MAX_BYTES = 2**20  # scores are added only to a card up to this size; cards written here are about 5 kB
# Flags that a model card lists; none is a path.
SHOWN = (
    "version", "mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "image_aspect_ratio",
    "mm_patch_merge_type", "model_max_length", "learning_rate", "mm_projector_lr", "mm_vision_tower_lr",
    "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "bf16", "fp16", "loss_reduction", "seed",
)  # fmt: skip

FORMS = ("hf", "llava", "adapter", "projector")  # other forms belong to extensions

# run/evaluate.py inserts its scores before this mark. It does not change a card without the mark.
EVALUATIONS_END = "<!-- llava_ds: evaluations end here -->"
USE_TRANSFORMERS = """\
```python
from PIL import Image
from transformers import AutoProcessor, {cls}

model = {cls}.from_pretrained({quoted}, dtype="auto")
processor = AutoProcessor.from_pretrained({quoted})

image, question = Image.open("image.png").convert("RGB"), "What is in the image?"
chat = [{{"role": "user", "content": [{{"type": "image", "image": image}}, {{"type": "text", "text": question}}]}}]
inputs = processor.apply_chat_template(
    chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
tokens = model.generate(**inputs.to(model.device, model.dtype), max_new_tokens=64, do_sample=False)
print(processor.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""
USE_LLAVA = """\
```python
from llava.model.builder import load_pretrained_model

tokenizer, model, image_processor, context_len = load_pretrained_model({quoted}, None, {called})
```
"""
USE_LLAVA_DS = """
In llava_ds:

    llava-ds chat --model_path {folder} --image image.png --question "What is in the image?"
"""


def write_card(
    output_dir: Path, form: str, args: Arguments, run_dir: Path, record: dict, step: int | None = None
) -> None:
    """Write README.md of an exported model.

    run_dir: the run's folder; record: content of run.json; step: the exported checkpoint's step, None for the last
    step. Scores in run_dir may belong to an earlier model, so none are written; add_evaluation inserts them. Models and
    data sets are named by the last part of their path, because the rest depends on the machine.
    """
    model, flags = args.model, args.as_dict()
    name = output_dir.resolve().name
    base = Path(model.model_name_or_path).name
    towers = " and ".join(Path(each).name for each in tower_folders(model.vision_tower))
    tower = f"the vision tower {towers}" if towers else "its own vision tower"
    data = Path(args.data.data_path).name if args.data.data_path is not None else "generated scenes"
    lines = [
        "---",
        "tags: [llava, image-text-to-text]",
        f"library_name: {_library(form)}",
        "pipeline_tag: image-text-to-text",
        "---",
        "",
        f"# {name}",
        "",
        f"{base} with {tower}, trained with llava_ds on {data}.",
        "",
        *_numbers(run_dir, record, step),
        f"- trained: {', '.join(sorted(trained_parts(model) | adapted_parts(model)))}",
        "",
        "| flag | value |",
        "| --- | --- |",
        *(f"| `--{flag}` | {flags[flag]} |" for flag in SHOWN if flags[flag] is not None),
        *(f"| `--plugin {name}.py` | sha256 {digest} |" for name, digest in record.get("plugins", {}).items()),
        "",
        "| package | version |",
        "| --- | --- |",
        *(f"| {package} | {version} |" for package, version in record["versions"].items()),
        "",
        *([] if form == "projector" else [EVALUATIONS_END, "", "## Asking it", "", _usage(output_dir, form, name)]),
    ]
    write_whole(output_dir / CARD, redact("\n".join(lines)))


def write_conversion_card(output_dir: Path, form: str, source: Path) -> None:
    """Write README.md of a model folder that was converted from `source`, a folder in another format."""
    name = output_dir.resolve().name
    text = f"# {name}\n\n{source.resolve().name}, converted by llava_ds.\n\n"
    usage = "" if form == "projector" else f"{EVALUATIONS_END}\n\n## Asking it\n\n{_usage(output_dir, form, name)}"
    write_whole(output_dir / CARD, text + usage)


def add_evaluation(folder: Path, name: str, scores: dict) -> bool:
    """Insert scores into a model's card, replacing an evaluation of the same name.

    Returns False if the folder has no card written by this project. scores: in the format of run/evaluate.py --output.
    The card is replaced atomically. Raises OSError if that fails.
    """
    path = folder / CARD
    try:
        card = read_bytes(own_file(path), MAX_BYTES).decode("utf-8")
    except (OSError, DataError, UnicodeDecodeError):
        return False
    if EVALUATIONS_END not in card:
        return False
    name = re.sub(r"[^\w .,:+-]|--+", "_", redact(name))  # characters that could end the HTML comment
    begin, end = f"<!-- evaluation: {name} -->\n", "<!-- end of evaluation -->\n"
    block = begin + "\n".join([f"## Evaluation: {name}", "", *_score_lines(scores), ""]) + "\n" + end
    old = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    if old.search(card):
        card = old.sub(lambda _: block, card, count=1)
    else:
        card = card.replace(EVALUATIONS_END, block + EVALUATIONS_END, 1)
    write_whole(path, card, shared=True)
    return True


def _numbers(run_dir: Path, record: dict, step: int | None) -> list[str]:
    """Return lines with the numbers of training up to a step; None: the last step."""
    run = read_run(run_dir)
    if step is not None:
        until = ([row for row in rows if row["step"] <= step] for rows in (run.metrics, run.evals))
        run = replace(run, **dict(zip(("metrics", "evals"), until)))
    numbers = run.numbers
    if "steps" not in numbers:
        return [f"- optimizer steps: {record['num_steps']:,}"]
    shown = (
        ("samples", "- samples: {:,.0f}"),
        ("tokens", "- tokens: {:,.0f}"),
        ("supervised_tokens", "- supervised tokens: {:,.0f}"),
        ("loss", "- loss at the end (running mean): {:.4f}"),
        ("held_out_loss", "- loss on eval samples: {:.4f}"),
    )
    epochs = f", {numbers['epoch']:.2f} epochs" if "epoch" in numbers else ""
    return [
        f"- optimizer steps: {numbers['steps']:,} of {record['num_steps']:,}{epochs}",
        *(form.format(numbers[name]) for name, form in shown if name in numbers),
        *(line for part in report_parts(run) for line in part.card()),
    ]


def _score_lines(scores: dict) -> list[str]:
    """Return a Markdown table of run/evaluate.py's scores: a row per kind of question, a column per condition."""
    columns = scores["scores"]
    kinds = next(iter(columns.values()))
    rows = [
        [_cell(kind), f"{asked:,}", *(f"{each[kind][0] / each[kind][1]:.3f}" for each in columns.values())]
        for kind, (_, asked) in kinds.items()
    ]
    head = [scores.get("metric", "accuracy"), "questions", *columns]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _cell(text: str) -> str:
    """Escape Markdown markup and cell separators in a text."""
    return re.sub(r"([|<>`*_\[\]\\])", r"\\\1", " ".join(text.split()))


def _library(form: str) -> str:
    """Return the model card's library_name for a format."""
    if form not in FORMS:
        return choice("format", form).library
    return "transformers" if form == "hf" else "llava"


def _usage(output_dir: Path, form: str, name: str) -> str:
    """Return the card's text on how to use the model. It says where to run the code, because the path is relative."""
    where = f"Run this in the folder that holds `{name}`, with an image named `image.png` there.\n\n"
    in_shell = "'" + name.replace("'", "'\\''") + "'"
    here, quoted = USE_LLAVA_DS.format(folder=in_shell), json.dumps(name, ensure_ascii=False)
    if form == "llava":
        called = quoted if "llava" in name.lower() else json.dumps(f"llava-{name}", ensure_ascii=False)
        return where + USE_LLAVA.format(quoted=quoted, called=called) + here
    if form not in FORMS:
        return f"Run this in the folder that holds `{name}`.\n\n" + choice("format", form).usage(in_shell)
    if form == "adapter":
        return where + here.lstrip()
    config = json.loads((output_dir / "config.json").read_text(encoding="utf-8"))
    return where + USE_TRANSFORMERS.format(cls=config["architectures"][0], quoted=quoted) + here
