"""run.json and ds_config.json: what was run, with what, so that it can be repeated."""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

from llava_ds import __version__
from llava_ds.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import DataError
from llava_ds.redact import redact

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "safetensors", "pillow")


def write_run_record(output_dir: Path, args: Arguments, ds_config: dict, num_steps: int) -> None:
    """Write run.json (flags, versions, revision, command) and ds_config.json (every "auto" filled), without secrets."""
    output_dir.mkdir(parents=True, exist_ok=True)
    record = {
        "command": sys.argv,
        "arguments": args.as_dict(),
        "num_steps": num_steps,
        "versions": {
            "llava_ds": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "git_revision": _git_revision(),
    }
    for name, content in (("run.json", record), ("ds_config.json", ds_config)):
        (output_dir / name).write_text(json.dumps(redact(content), indent=2) + "\n", encoding="utf-8")


def read_run_record(output_dir: Path) -> tuple[Arguments, dict]:
    """The flags in run.json, and all of it. Raises DataError where it is missing, or an other version's."""
    path = output_dir / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        flags = record["arguments"]
        sections = [
            cls(**{field.name: flags.pop(field.name) for field in dataclasses.fields(cls) if field.name in flags})
            for cls in (ModelArguments, DataArguments, TrainingArguments)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} can't be read ({error}): it says what the run was, and has to lie there") from error
    if flags:
        raise DataError(f"{path} has flags that this version does not know: {', '.join(flags)}")
    return Arguments(*sections, frozenset()), record


def _git_revision() -> str | None:
    """The source's commit, with "+" where files differ from it; None outside a checkout or without git."""
    here = Path(__file__).parent
    try:
        revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision.stdout.strip() + ("+" if changes.stdout.strip() else "")
