"""trainer_state.json in the format of Hugging Face's Trainer, for programs that read it."""

import json
from pathlib import Path

from llava_ds.files.jsonl import read_metrics
from llava_ds.files.writing import write_whole

TRAINER_STATE = "trainer_state.json"


def write_trainer_state(output_dir: Path, batch_size: int, num_epochs: float) -> None:
    """Write trainer_state.json from metrics.jsonl.

    Source: transformers' TrainerState, as saved by LLaVA's scripts.
    """
    rows = read_metrics(output_dir / "metrics.jsonl")
    history = [
        {
            "epoch": row["epoch"],
            "step": row["step"],
            "loss": row["loss"],
            "learning_rate": row["lr"][0],
            **({} if row["grad_norm"] is None else {"grad_norm": row["grad_norm"]}),
        }
        for row in rows
    ]
    last = rows[-1] if rows else {"step": 0, "epoch": 0.0}
    state = {
        "epoch": last["epoch"],
        "global_step": last["step"],
        "max_steps": last["step"],
        "num_train_epochs": num_epochs,
        "train_batch_size": batch_size,
        "num_input_tokens_seen": sum(row["tokens"] for row in rows),
        "best_metric": None,
        "best_model_checkpoint": None,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": history,
        "trial_name": None,
        "trial_params": None,
    }
    write_whole(output_dir / TRAINER_STATE, json.dumps(state, indent=2) + "\n")
