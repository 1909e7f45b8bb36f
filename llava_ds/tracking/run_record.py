"""Write and read run.json and ds_config.json: the settings and versions that are needed to repeat a run."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from typing_extensions import NotRequired, TypedDict

from llava_ds import __version__
from llava_ds.config.arguments import SECTIONS, Arguments, declared_by, loaded
from llava_ds.constants import DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.active import flags_class, owners, plugins, requested
from llava_ds.files.reading import mismatch, read_json
from llava_ds.files.writing import run_folder, write_whole
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.redact import redact

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "safetensors", "pillow")
LENGTH_BINS = 40


def write_run_record(
    output_dir: Path,
    args: Arguments,
    resolved: ResolvedConfig,
    num_steps: int,
    dataset: EncodedDataset,
    held_out: EncodedDataset | None,
    ranks: Ranks,
) -> None:
    """Write run.json and ds_config.json, without secrets.

    run.json has flags, versions, git revision, command, data, and the reason for each value filled in for "auto".
    """
    folder = run_folder(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "command": sys.argv,
        "folder": os.getcwd(),  # base of relative paths in the flags
        "arguments": args.as_dict(),
        "given": sorted(args.given),
        **({"plugins": plugins()} if plugins() else {}),
        "num_steps": num_steps,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "world_size": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type,
        "versions": {
            "llava_ds": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "git_revision": _git_revision(),
        "ds_config_reasons": resolved.reasons,
        "data": data_record(args, dataset, held_out) if dataset.is_whole else {"summary": dataset.summary()},
    }
    for name, content in (("run.json", record), ("ds_config.json", resolved.config)):
        write_whole(folder / name, json.dumps(redact(content), indent=2) + "\n")


def data_record(args: Arguments, dataset: EncodedDataset, held_out: EncodedDataset | None) -> dict[str, object]:
    """Return run.json's "data", for a data set that is completely encoded."""
    return {
        "summary": dataset.summary(),
        "fingerprint": dataset.fingerprint,
        "lengths": length_histogram(dataset.lengths),
        "held_out": eval_summary(args, held_out),
    }


def complete_run_record(output_dir: Path, data: dict[str, object]) -> None:
    """Replace "data" in run.json, once all data are encoded. data: from data_record."""
    path = run_folder(output_dir) / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    write_whole(path, json.dumps({**record, "data": redact(data)}, indent=2) + "\n")


def eval_summary(args: Arguments, held_out: EncodedDataset | None) -> list[str]:
    """Return lines about the eval data and its origin; empty without eval data."""
    if held_out is None:
        return []
    samples = "1 sample" if len(held_out) == 1 else f"{len(held_out):,} samples"
    if not args.data.eval_fraction:
        return [f"{samples} of --eval_data_path {args.data.eval_data_path}", *held_out.summary()]
    seed = args.training.seed if args.training.data_seed is None else args.training.data_seed
    tokens, targets = (held_out.index.facts[name] for name in ("tokens", "targets"))
    return [
        f"{samples} of the accepted records of --data_path: --eval_fraction {args.data.eval_fraction:g}, drawn by seed "
        f"{seed}; they are not trained on",
        f"{tokens:,} tokens, of which {targets:,} ({targets / tokens:.1%}) are supervised",
    ]


def length_histogram(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Count the samples by length. Returns "counts", and "edges" of the bins in tokens, one more than counts."""
    longest = int(np.max(lengths)) if len(lengths) else 1
    width = -(-longest // LENGTH_BINS)
    edges = np.arange(0, longest + width + 1, width)
    # Lengths are whole numbers from 1, so adding 1 to the edges puts a length equal to an edge in the bin below it.
    counts, _ = np.histogram(lengths, edges + 1)
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    return {"edges": edges[: last + 1].tolist(), "counts": counts[:last].tolist()}


class RunRecord(TypedDict):
    """The part of run.json that later commands read.

    given: names of flags on the command line; plugins: sha256 of their files, by name; folder: base of relative paths.
    """

    arguments: dict[str, Any]
    given: NotRequired[list[str]]
    num_steps: int
    plugins: NotRequired[dict[str, str]]
    versions: dict[str, str]
    folder: NotRequired[str]


def read_run_record(output_dir: Path) -> tuple[Arguments, dict]:
    """Return run.json's flags and its content. Raises DataError if it is missing, damaged, or has unknown flags."""
    path = run_folder(output_dir) / "run.json"
    try:
        record = read_json(path, RunRecord)
    except (FileNotFoundError, DataError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else error
        raise DataError(
            f"{path} can't be read ({reason}): it has the run's flags, and belongs in the run's folder"
        ) from error
    try:
        args, unknown = arguments_of(record["arguments"], record.get("given", ()))
    except DataError as error:
        raise DataError(f"{path} can't be used: {error}") from None
    if missing := [name for name in record.get("plugins", {}) if name not in plugins()]:
        file = record["arguments"].get("plugin")
        raise DataError(f"{path} was trained with --plugin {file}: give --plugin with the path of {missing[0]}.py")
    if unknown:
        raise DataError(f"{path} has flags that this version does not know: {', '.join(unknown)}")
    return args, record


def arguments_of(values: Mapping[str, object], given: Iterable[str]) -> tuple[Arguments, list[str]]:
    """Build the flags from values by name, as in run.json. Returns them and the names of unknown flags.

    given: names of flags on the command line. Raises DataError if a value has the wrong type.
    """
    flags = dict(values)
    extensions, sections = requested(flags), []
    for cls in (*SECTIONS, *map(flags_class, extensions)):
        types = get_type_hints(cls)
        known = {name: flags.pop(name) for name in declared_by(cls) if name in flags}
        for name, value in known.items():
            if (problem := mismatch(value, types[name])) is not None:
                raise DataError(f"--{name} in it is of the wrong type ({problem})")
        sections.append(cls(**known))
    model, data, training, *own = sections
    own = loaded(dict(zip(extensions, own)), (model, data, training))
    unknown = [name for name in flags if not owners([name])]
    return Arguments(model, data, training, frozenset(given), own), unknown


def _git_revision() -> str | None:
    """Return the commit of this source code, with "+" if files were changed; None without git or a checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
