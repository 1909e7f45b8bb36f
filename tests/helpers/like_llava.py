"""Results of LLaVA's own code on tiny models and data, and its input files. See model/goldens/README.md."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
TOKENIZER = Path(__file__).parents[1] / "data" / "goldens" / "tokenizers" / "llama_slow_legacy"


def write_base(folder: Path) -> dict[str, object]:
    """Put the language model together with its tokenizer; return the flags that name it and the images."""
    shutil.copytree(GOLDENS / "llama", folder / "llama")
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder / "llama")
    return {
        "model_name_or_path": folder / "llama",
        "vision_tower": GOLDENS / "clip",
        "image_folder": GOLDENS / "pictures",
        "model_max_length": 512,
    }


def records(name: str) -> list[dict]:
    return json.loads((GOLDENS / f"{name}.json").read_text())


def write_records(path: Path, chosen: list[dict]) -> Path:
    path.write_text(json.dumps(chosen))
    return path


def write_adapter(path: Path, tensors: dict, case: str) -> Path | None:
    """The projector (and the newline) of a case as a file for --pretrain_mm_mlp_adapter; None if it has none."""
    beginning = f"{case}/model."
    own = {name.removeprefix(f"{case}/"): value for name, value in tensors.items() if name.startswith(beginning)}
    if not own:
        return None
    save_file(own, path)
    return path
