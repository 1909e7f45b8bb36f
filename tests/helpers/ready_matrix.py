"""docs/matrix.md: the objectives, parallel axes, packed weights and exports that each model takes, as checks say.

python tests/helpers/ready_matrix.py --write docs/matrix.md
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

import llavas
import ready_gguf
import ready_models
import torch
import toys

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.export.export_plan import ExportPlan
from llava_ds.extensions.active import choice
from llava_ds.model.open.folder import take_from_model
from llava_ds.train import plan

LORA = {"lora_enable": True, "lora_r": 4}
COLUMNS = {
    "DPO": {"objective": "dpo"},
    "reward model": {"objective": "reward"},
    "GRPO": {"objective": "grpo", "reward_funcs": "exact"},
    "PPO": {"objective": "ppo", "reward_funcs": "exact"},
    "KTO": {"objective": "kto"},
    "distillation": {"objective": "gkd", "teacher_model_name_or_path": "the model itself"},
    "classes": {"objective": "classify", "labels": "cat,dog"},
    "embeddings": {"objective": "embed"},
    "QLoRA": {**LORA, "bits": 4},
    "sequence": {"sequence_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
FORMATS = {"GGUF": "gguf"}  # columns of exports
TWO = {"num_key_value_heads": 2}  # the published models have as many or more, but for E2B
ROWS = {  # the published sizes that a row is about, its family, and settings of its language model
    "LLaVA's own composition": ("", {}),
    "Qwen2-VL 7B": ("qwen2_vl", TWO),
    "Qwen2.5-VL 7B": ("qwen2_5_vl", TWO),
    "Qwen3-VL 8B": ("qwen3_vl", TWO),
    "Qwen3-VL 2B, 4B": ("qwen3_vl", {**TWO, "tie_word_embeddings": True}),
    "Qwen3-VL-MoE": ("qwen3_vl_moe", TWO),
    "Qwen3.5": ("qwen3_5", TWO),
    "Qwen3.5-MoE": ("qwen3_5_moe", TWO),
    "Gemma 3": ("gemma3", {}),
    "Gemma 4 31B": ("gemma4", {"num_global_key_value_heads": 2}),
    "Gemma 4 26B-A4B": ("gemma4_moe", {"num_global_key_value_heads": 2}),
    "Gemma 4 E4B": ("gemma4_e", {}),
    "Gemma 4 E2B": ("gemma4_e", {"num_key_value_heads": 1}),
    "SmolVLM": ("smolvlm", {}),
    "Idefics3": ("idefics3", {}),
    "InternVL": ("internvl", {}),
}
BEGIN = """# Models and features

For people who choose a model: ✓, or the number of the reason why a feature is refused. Every ✓ is tested against
transformers' own forward, one rank or llama.cpp.

"""


def refusal(given: dict[str, str], flags: dict[str, object], form: str = "") -> str:
    """Return the reason why a run, or an export of this form, refuses a model with these flags; "" if it doesn't."""
    data = {"data_path": __file__, "deepspeed_config": "zero1", "output_dir": "out"}
    words = [word for name, value in {**data, **given, **flags}.items() for word in (f"--{name}", str(value))]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args, _ = parse_arguments(words)
            args, _ = take_from_model(args)
            model, images, _ = plan._plan_model(args)
            if form:
                choice("format", form).planned(ExportPlan(model, args.model, images, torch.float32, 512), "auto")
    except ConfigError as error:
        return " ".join(str(error).splitlines())
    return ""


def refusals(folder: Path) -> dict[str, dict[str, str]]:
    """Return the reason of every cell, by row and column."""
    found = {}
    for row, (family, text) in ROWS.items():
        base = folder / row.replace(" ", "-")
        if family in ready_gguf.FAMILIES:
            path = str(ready_gguf.write_ready(base, family, **text))
            given, teacher = {"model_name_or_path": path}, {"teacher_model_name_or_path": path}
        elif family:
            given = ready_models.write_ready(base, family, **text)
            teacher = {"teacher_model_name_or_path": given["model_name_or_path"]}
        else:
            given = toys.write_base(base)
            llavas.write_hf(base / "llava", given, llavas.hf_model(given))
            teacher = {"teacher_model_name_or_path": str(base / "llava")}
        found[row] = {
            column: refusal(given, flags | {key: teacher[key] for key in flags.keys() & teacher})
            for column, flags in COLUMNS.items()
        } | {column: refusal(given, {}, form) for column, form in FORMATS.items()}
    return found


def page(cells: dict[str, dict[str, str]]) -> str:
    """Return docs/matrix.md."""
    reasons: dict[str, int] = {}
    columns = [*COLUMNS, *FORMATS]
    lines = [f"| |{'|'.join(columns)}|", f"|---|{'---|' * len(columns)}"]
    for row, of_row in cells.items():
        marks = [str(reasons.setdefault(why, len(reasons) + 1)) if why else "✓" for why in of_row.values()]
        lines.append(f"|{row}|{'|'.join(marks)}|")
    return "\n".join([BEGIN + lines[0], *lines[1:], "", *(f"{number}. {why}" for why, number in reasons.items()), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="the page")
    with tempfile.TemporaryDirectory() as folder:
        parser.parse_args().write.write_text(page(refusals(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main()
