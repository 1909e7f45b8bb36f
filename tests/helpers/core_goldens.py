"""Goldens of a rebuild: what two checkouts have to agree on to the last bit, on one machine.

    python tests/helpers/core_goldens.py write --project CHECKOUT FOLDER [--only NAME ...]
    python tests/helpers/core_goldens.py compare FOLDER FOLDER

FOLDER/JOB.json has each step's loss, gradient norm and rates, the parameter groups, the tensors of the first batches,
eval losses, the checkpoint's layout and the hash of the exported weights. Bits depend on the processor and the
libraries, so goldens are written by both checkouts where they are compared, and are in no commit.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent
WORKER = HELPERS.parent / "workers" / "golden_run.py"
KEPT = ("step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens")
TOY = {"train_batch_size": 4, "learning_rate": 2e-3, "mm_projector_lr": 1e-3, "model_max_length": 512, "max_steps": 5}
TOY |= {"save_strategy": "steps", "save_steps": 3, "warmup_ratio": 0.0}
MOE = {"moe_enable": True, "moe_mode": "dense", "num_experts": 4, "top_k_experts": 2, "router_aux_loss_coef": 0.01}
LORA = {"lora_enable": True, "lora_r": 4}

# Name: ranks, ZeRO stage, the data and model that it takes, more flags.
JOBS: dict[str, tuple[int, int, str, dict[str, object]]] = {
    **{f"pretrain-{ranks}-{stage}": (ranks, stage, "pretrain", {}) for ranks in (1, 2) for stage in range(4)},
    **{f"finetune-{ranks}-{stage}": (ranks, stage, "finetune", {}) for ranks in (1, 2) for stage in range(4)},
    "packed": (2, 2, "toy", {"tokens_per_micro_batch": 400}),
    "bf16": (2, 2, "toy", {"bf16": True}),
    "recomputed": (2, 3, "toy", {"gradient_checkpointing": True}),
    "anyres": (1, 2, "toy", {"image_aspect_ratio": "anyres", "mm_patch_merge_type": "spatial_unpad"}),
    "sequence": (2, 3, "toy", {"sequence_parallel_size": 2}),
    "tensor": (2, 1, "toy", {"tensor_parallel_size": 2}),
    "pipeline": (2, 1, "toy", {"pipeline_parallel_size": 2, "per_device_train_batch_size": 1}),
    "experts": (2, 2, "toy", {**MOE, "ep_size": 2}),
    "experts-alone": (1, 1, "toy", MOE),
    "lora": (2, 2, "toy", LORA),
    "lora-dora": (1, 3, "toy", {**LORA, "use_dora": True}),
    "ema": (2, 2, "toy", {"enable_ema": True}),
    "dpo": (2, 2, "pairs", {"objective": "dpo"}),
    "dpo-lora": (1, 3, "pairs", {"objective": "dpo", **LORA}),
    "reward": (2, 2, "pairs", {"objective": "reward"}),
    "liger-free-tiles": (1, 2, "toy", {"mlp_tile_tokens": 64}),
    "ready": (2, 2, "ready", {}),
    "ready-lora": (1, 3, "ready", LORA),
}  # fmt: skip


def write(project: Path, folder: Path, names: list[str]) -> None:
    """Run jobs of a checkout, and write a file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    given = materials(project, folder / "materials")
    for name in names:
        ranks, stage, kind, more = JOBS[name]
        out = folder / "runs" / name
        shutil.rmtree(out, ignore_errors=True)
        flags = {**given[kind], **more, "output_dir": out, "cache_dir": folder / "cache"}
        flags["deepspeed_config"] = project / "ds_configs" / f"zero{stage}.json"
        noted = run(project, ranks, folder / f"{name}.noted", flags)
        (folder / f"{name}.json").write_text(json.dumps({**noted, **read(out)}, indent=1))
        print(name, "written", flush=True)


def materials(project: Path, folder: Path) -> dict[str, dict[str, object]]:
    """Flags that name model and data, by kind of job; made by the checkout's own helpers, from seeds."""
    tiny = {
        stage: {"recipe": project / f"run/recipes/tiny-{stage}.yaml", "max_steps": 6, "save_steps": 6}
        for stage in ("pretrain", "finetune")
    }
    made = folder / "flags.json"
    if not made.exists():
        code = (
            f"import sys, json; sys.path[:0] = [{str(project)!r}, {str(project / 'tests/helpers')!r}, "
            f"{str(project / 'tests/extensions/ready')!r}]\n"
            "from pathlib import Path; import toys\n"
            "from textbook_pairs import write_pairs; from ready_models import write_ready\n"
            f"f = Path({str(folder)!r}); base = toys.write_base(f / 'base')\n"
            "data = toys.write_data(f / 'data', 'itii' * 5)\n"
            "write_ready(f / 'ready', 'qwen2_5_vl')\n"
            "pairs = write_pairs(f / 'pairs', 20)\n"
            f"Path({str(made)!r}).write_text(json.dumps({{'toy': {{**base, **data}}, 'pairs': {{**base, **pairs}}, "
            "'ready': {'model_name_or_path': str(f / 'ready'), **data}}))\n"
        )
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(project / ".venv/bin/python"), "-c", code], check=True, env=environment(project))
    return {**tiny, **{kind: {**TOY, **flags} for kind, flags in json.loads(made.read_text()).items()}}


def environment(project: Path) -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(project: Path, ranks: int, noted: Path, flags: dict[str, object]) -> dict[str, object]:
    """One launch; ends this process with its output where it fails."""
    command = [str(project / ".venv/bin/python"), str(project / ".venv/bin/deepspeed"), "--log_level", "error"]
    command += [
        "--master_port",
        str(free_port()),
        "--num_accelerators",
        str(ranks),
        str(WORKER),
        str(project),
        str(noted),
    ]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, env=environment(project), capture_output=True, text=True)
    if done.returncode or not noted.exists():
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(noted.read_text())


def read(out: Path) -> dict[str, object]:
    """A run's results: curves, the layouts of its last checkpoint, and the hash of the exported weights."""
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    evals = out / "run" / "evals.jsonl"
    checkpoints = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    weights = sorted([*out.glob("*.safetensors"), *out.glob("mm_projector.bin")])
    return {
        "steps": [{name: row[name] for name in KEPT} for row in rows],
        "rewards": [{name: value for name, value in row.items() if "/" in name} for row in rows],
        "evals": [json.loads(line)["loss"] for line in evals.read_text().splitlines()] if evals.exists() else [],
        "layout": {path.name: json.loads(path.read_text()) for path in sorted(checkpoints[-1].glob("layout-*.json"))},
        "weights": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights},
    }


def compare(first: Path, second: Path) -> int:
    """Print what differs, and return the number of jobs that do."""
    names = sorted({path.name for folder in (first, second) for path in folder.glob("*.json")})
    wrong = 0
    for name in names:
        if not ((first / name).exists() and (second / name).exists()):
            print(f"{name}: only one of both")
            continue
        a, b = (json.loads((folder / name).read_text()) for folder in (first, second))
        other = [part for part in a.keys() | b.keys() if a.get(part) != b.get(part)]
        wrong += bool(other)
        print(f"{name.removesuffix('.json'):20} {'equal' if not other else 'OTHER: ' + ', '.join(sorted(other))}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("--project", type=Path, default=HELPERS.parents[1])
    writing.add_argument("folder", type=Path)
    writing.add_argument("--only", nargs="*", default=list(JOBS), choices=JOBS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("folders", type=Path, nargs=2)
    args = parser.parse_args()
    if args.command == "compare":
        return min(1, compare(*args.folders))
    write(args.project.resolve(), args.folder.resolve(), args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
