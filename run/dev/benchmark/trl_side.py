# P prompts of a step, G answers to each, B pairs or answers of a batch, L tokens of its longest row
"""TRL's side of run/dev/compare_trl.py, which starts it by the interpreter of TRL's environment: trl_side.py JOBS.json

JOBS.json is a list of jobs. Each names a model folder, its data, settings of TRL's trainer, and the file that gets
losses and batches. Nothing of llava_ds is imported here.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch
from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

# fp32 on one process, at a constant rate.
COMMON = {
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_first_step": False,
}


def load(folder: str) -> LlavaForConditionalGeneration:
    """Load a LLaVA in fp32, whose vision tower is frozen, as llava_ds has it."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.model.vision_tower.requires_grad_(False)
    return model


def with_images(rows: list[dict]) -> datasets.Dataset:
    """A data set whose images are read when a row is taken."""
    table = datasets.Dataset.from_list(rows)
    if "images" in table.column_names:
        table = table.cast_column("images", datasets.List(datasets.Image()))
    return table


def preferences(job: dict) -> dict[str, object]:
    """Train by DPOTrainer or CPOTrainer."""
    rows = json.loads(Path(job["data"]).read_text())
    processor, taken = AutoProcessor.from_pretrained(job["model"]), []
    is_dpo = job["trainer"] == "dpo"
    trainer_class, config_class = (DPOTrainer, DPOConfig) if is_dpo else (CPOTrainer, CPOConfig)
    if not is_dpo:
        processor = AutoTokenizer.from_pretrained(job["model"])

    class Recorded(trainer_class):
        """Notes the rows of every batch that the loss is asked for."""

        def compute_loss(self, model, inputs, *args, **kwargs):
            taken.append(rows_of(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        config = config_class(folder, **COMMON, train_sampling_strategy="sequential", **job["settings"])
        trainer = Recorded(
            model=load(job["model"]), args=config, train_dataset=with_images(rows), processing_class=processor
        )
        trainer.train()
    return {"log": logged(trainer), "batches": taken}


def rows_of(inputs: dict) -> list[list]:
    """(ids, supervised ids) of every row of a batch, chosen answers first."""
    if "chosen_input_ids" in inputs:  # CPO's
        found = []
        for name in ("chosen", "rejected"):
            parts = (inputs[f"{name}_{what}"] for what in ("input_ids", "attention_mask", "labels"))
            found += [[i[a == 1].tolist(), i[label != -100].tolist()] for i, a, label in zip(*parts)]
        return found
    parts = (inputs[name] for name in ("input_ids", "attention_mask", "completion_mask"))
    return [[i[a == 1].tolist(), i[c == 1].tolist()] for i, a, c in zip(*parts)]


def logged(trainer) -> list[dict]:
    """The rows of the log with a loss."""
    return [row for row in trainer.state.log_history if "loss" in row]


class Replay:
    """Rollouts that were drawn elsewhere, as TRL's rollout_func and as its reward."""

    def __init__(self, steps: list[list[dict]]) -> None:
        self.steps, self.at = steps, -1

    def answers(self, prompts: list, trainer) -> dict[str, list]:
        """The next step's, one for each of the prompts, which come G times each."""
        self.at += 1
        groups = self.steps[self.at]
        expected = [group["question"] for group in groups for _ in group["answers"]]
        found = [message["content"] for [message] in prompts]
        found = [each if isinstance(each, str) else each[-1]["text"] for each in found]
        assert found == expected, (found[0], expected[0])
        every = [(group["prompt_ids"], answer) for group in groups for answer in group["answers"]]
        return {
            "prompt_ids": [prompt for prompt, _ in every],
            "completion_ids": [answer["ids"] for _, answer in every],
            "logprobs": [answer["log_probs"] for _, answer in every],
        }

    def rewards(self, prompts, completions, **_) -> list[float]:
        """Those of the step whose answers were given last."""
        return [reward for group in self.steps[self.at] for reward in group["rewards"]]


def policy_trainer(job: dict, folder: str, steps: list[list[dict]]) -> GRPOTrainer:
    """GRPOTrainer over rollouts that are given, in their order."""
    groups = [group for step in steps for group in step]
    rows = [{"prompt": [{"role": "user", "content": group["question"]}]} for group in groups]
    for row, group in zip(rows, groups):
        if group["image"] is not None:
            row["images"] = [group["image"]]
    replay = Replay(steps)
    most = max(len(answer["ids"]) for group in groups for answer in group["answers"])
    settings = {"max_completion_length": most, "shuffle_dataset": False, **job["settings"]}
    return GRPOTrainer(
        model=load(job["model"]),
        reward_funcs=replay.rewards,
        args=GRPOConfig(folder, **COMMON, num_generations=len(groups[0]["answers"]), **settings),
        train_dataset=with_images(rows),
        processing_class=AutoProcessor.from_pretrained(job["model"]),
        rollout_func=replay.answers,
    )


def policy(job: dict) -> dict[str, object]:
    """Train by GRPOTrainer on rollouts that are given."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = policy_trainer(job, folder, json.loads(Path(job["data"]).read_text()))
        trainer.train()
    return {"log": logged(trainer)}


def outputs_of(rows: torch.Tensor, length: int):
    """A model that says these log-probabilities (B, C), at the end of rows of so many tokens, whatever it is given."""
    padded = torch.nn.functional.pad(rows, (length - 1 - rows.shape[1], 0))
    other = torch.zeros_like(padded)
    named = {"log_probs": padded, "entropy": other, "mean_logits": other, "is_top1": other.bool()}
    return lambda **_: SimpleNamespace(**named)


def pair_formulas(job: dict) -> list[float]:
    """The losses that DPOTrainer and CPOTrainer compute of log-probabilities that are given."""
    given = json.loads(Path(job["data"]).read_text())
    rows = [{"prompt": "yes", "chosen": "no", "rejected": "two"}]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        options = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
        dpo = DPOTrainer(load(job["model"]), args=DPOConfig(folder, **COMMON), **options)
        cpo = CPOTrainer(load(job["model"]), args=CPOConfig(folder, **COMMON), **options)
        for case in given:
            lengths = torch.tensor(case["lengths"])  # (B, 2)
            rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in case["rows"]], batch_first=True)
            mask = torch.arange(rows.shape[1]) < lengths.T.reshape(-1, 1)  # chosen answers, then rejected ones
            if case["trainer"] == "cpo":
                cpo.beta, cpo.label_smoothing = case["beta"], case["label_smoothing"]
                cpo.loss_type, cpo.simpo_gamma = "simpo", case["simpo_gamma"]
                means = (rows * mask).sum(1) / mask.sum(1)
                found.append(cpo.cpo_loss(*means.chunk(2))[0].mean().item())
                continue
            dpo.beta, dpo.loss_types, dpo.loss_weights = case["beta"], case["loss_types"], case["loss_weights"] or [1.0]
            dpo.label_smoothing, dpo.precompute_ref_logps = case["label_smoothing"], True
            prompt = torch.zeros(len(mask), 1, dtype=torch.int64)
            completion = torch.cat([prompt, mask.long()], 1)
            reference = torch.tensor(case["reference"]).T  # (2, B)
            inputs = {
                "input_ids": torch.zeros_like(completion), "attention_mask": torch.ones_like(completion),
                "completion_mask": completion, "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1],
            }  # fmt: skip
            found.append(dpo._compute_loss(outputs_of(rows, completion.shape[1]), inputs, False).item())
    return found


def policy_formulas(job: dict) -> list[dict]:
    """GRPOTrainer's advantages, and its losses of log-probabilities that are given."""
    given = json.loads(Path(job["data"]).read_text())
    found = []
    for settings in given["settings"]:
        with tempfile.TemporaryDirectory() as folder:
            answers = sum(len(group["answers"]) for group in given["groups"])
            whole = {"per_device_train_batch_size": answers, **settings}
            trainer = policy_trainer({**job, "settings": whole}, folder, [given["groups"]])
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            rows = [trainer.train_dataset[i] for i in range(len(given["groups"]))]
            inputs = trainer._generate_and_score_completions([row for row in rows for _ in range(answers // len(rows))])
            named = {
                name: torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in given[name]], batch_first=True)
                for name in ("rows", "old", "frozen")
            }
            inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = named["old"], named["frozen"]
            length = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
            loss = trainer._compute_loss(outputs_of(named["rows"], length), inputs)
            found.append({"loss": loss.item(), "advantages": inputs["advantages"].tolist()})
    return found


KINDS = {
    "preferences": preferences, "policy": policy, "pair_formulas": pair_formulas, "policy_formulas": policy_formulas,
}  # fmt: skip


def main() -> None:
    """Do the jobs, one after the other."""
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")}
    for job in json.loads(Path(sys.argv[1]).read_text()):
        done = KINDS[job["kind"]](job)
        Path(job["result"]).write_text(json.dumps({"versions": versions, "found": done}))


if __name__ == "__main__":
    main()
