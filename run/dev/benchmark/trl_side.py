# P prompts per step, G answers per prompt, B pairs or answers per batch, L tokens of the batch's longest row
"""Run TRL for run/dev/compare_trl.py, with the Python of TRL's environment: trl_side.py GIVEN RESULTS

GIVEN is a JSON file with a model folder and log-probabilities; TRL's losses and advantages are written to RESULTS.
This script does not import llava_ds.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

COMMON = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True, "report_to": "none"}


def policy_trainer(model: str, folder: str, groups: list[dict], settings: dict) -> GRPOTrainer:
    """Build a GRPOTrainer over given answers and rewards, G answers for each of P prompts."""
    prompts = [{"prompt": group["question"]} for group in groups]
    every = [(group["prompt_ids"], answer) for group in groups for answer in group["answers"]]

    def answers(prompts: list, trainer) -> dict[str, list]:
        return {
            "prompt_ids": [ids for ids, _ in every],
            "completion_ids": [answer["ids"] for _, answer in every],
            "logprobs": [answer["log_probs"] for _, answer in every],
        }

    def rewards(prompts, completions, **_) -> list[float]:
        return [reward for group in groups for reward in group["rewards"]]

    longest = max(len(answer["ids"]) for _, answer in every)
    given = {"max_completion_length": longest, "shuffle_dataset": False, "per_device_train_batch_size": len(every)}
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=rewards,
        args=GRPOConfig(folder, **COMMON, num_generations=len(groups[0]["answers"]), **given, **settings),
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer_of(model),
        rollout_func=answers,
    )


def outputs_of(rows: torch.Tensor, length: int):
    """Build a model that ignores its input and ends rows of this length with these log-probabilities (B, C)."""
    padded = torch.nn.functional.pad(rows, (length - 1 - rows.shape[1], 0))
    other = torch.zeros_like(padded)
    named = {"log_probs": padded, "entropy": other, "mean_logits": other, "is_top1": other.bool()}
    return lambda **_: SimpleNamespace(**named)


def tokenizer_of(folder: str):
    """Open a model's tokenizer, with its end token as padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def padded(rows: list[list[float]]) -> torch.Tensor:
    """Pad rows of several lengths to (B, L)."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def loss_without_reference(trainer, case: dict, rows: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the loss of CPOTrainer or ORPOTrainer for log-probabilities (2 B, L); mask (2 B, L) bool: their tokens.

    The model has two tokens: the expected one, 0, with these log-probabilities, and another.
    """
    rows = rows.clamp(max=-1e-6)
    logits = torch.nn.functional.pad(torch.stack([rows, (-rows.expm1()).log()], 2), (0, 0, 0, 1))  # (2 B, 1 + L, 2)
    attended = torch.nn.functional.pad(mask, (1, 0), value=True).long()  # after a prompt of one token
    ids = torch.zeros_like(attended)
    labels = torch.where(torch.nn.functional.pad(mask, (1, 0)), ids, -100)
    named = {"input_ids": ids, "attention_mask": attended, "labels": labels}
    batch = {
        f"{answer}_{name}": values
        for name, both in named.items()
        for answer, values in zip(("chosen", "rejected"), both.chunk(2))
    }
    trainer.beta, trainer.label_smoothing = case["beta"], case["label_smoothing"]
    trainer.loss_type, trainer.simpo_gamma = case.get("loss_types", ["simpo"])[0], case["simpo_gamma"]
    trainer.cpo_alpha = case.get("cpo_alpha", 0.0)
    return trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), batch)[0].item()


def pair_losses(model: str, cases: list[dict]) -> list[float]:
    """Return the losses of DPOTrainer, CPOTrainer and ORPOTrainer for given log-probabilities."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"prompt": "yes", "chosen": "no", "rejected": "two"}]
        options = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer_of(model)}
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        dpo = DPOTrainer(loaded, args=DPOConfig(folder, **COMMON), **options)
        others = {
            "cpo": CPOTrainer(loaded, args=CPOConfig(folder, **COMMON), **options),
            "orpo": ORPOTrainer(loaded, args=ORPOConfig(folder, **COMMON), **options),
        }
        for case in cases:
            rows = padded(case["rows"])
            lengths = torch.tensor(case["lengths"])  # (B, 2)
            mask = torch.arange(rows.shape[1]) < lengths.T.reshape(-1, 1)  # chosen answers, then rejected ones
            if case["trainer"] in others:
                found.append(loss_without_reference(others[case["trainer"]], case, rows, mask))
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


def answer_losses(model: str, cases: list[dict]) -> list[float]:
    """Return KTOTrainer's losses, given log-probabilities for answers and for mismatched answers."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"prompt": "yes", "completion": answer, "label": answer == "no"} for answer in ("no", "two")]
        options = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer_of(model)}
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        kto = KTOTrainer(loaded, args=KTOConfig(folder, per_device_train_batch_size=2, **COMMON), **options)
        kto.precompute_ref_logps = True
        for case in cases:
            kto.beta, kto.desirable_weight, kto.undesirable_weight = case["beta"], *case["weights"]
            rows, mismatched = padded(case["rows"]), padded(case["mismatched"])
            shape = len(rows), rows.shape[1] + 1
            ones, other = torch.ones(shape, dtype=torch.int64), torch.ones(shape[0], mismatched.shape[1] + 1).long()
            inputs = {
                "input_ids": ones, "attention_mask": ones, "completion_mask": ones,
                "KL_input_ids": other, "KL_attention_mask": other, "KL_completion_mask": other,
                "label": torch.tensor(case["labels"]), "ref_logps": torch.tensor(case["reference"]),
                "ref_KL_logps": torch.tensor(case["mismatched_reference"]),
            }  # fmt: skip
            passes = iter([outputs_of(mismatched, other.shape[1]), outputs_of(rows, shape[1])])  # in TRL's order
            loss = kto._compute_loss(lambda passes=passes, **given: next(passes)(**given), inputs, False)
            found.append(loss.item())
    return found


def policy_losses(model: str, given: dict) -> list[dict]:
    """Return GRPOTrainer's advantages, and its losses for given log-probabilities."""
    found = []
    for settings in given["settings"]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = policy_trainer(model, folder, given["groups"], settings)
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            rows = [row for row in trainer.train_dataset for _ in given["groups"][0]["answers"]]
            inputs = trainer._generate_and_score_completions(rows)
            inputs["old_per_token_logps"] = padded(given["old"])
            inputs["ref_per_token_logps"] = padded(given["frozen"])
            length = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
            loss = trainer._compute_loss(outputs_of(padded(given["rows"]), length), inputs)
            found.append({"loss": loss.item(), "advantages": inputs["advantages"].tolist()})
    return found


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(Path(sys.argv[1]).read_text())
    found = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
        "pairs": pair_losses(given["model"], given["pairs"]),
        "answers": answer_losses(given["model"], given["answers"]),
        "policy": policy_losses(given["model"], given["policy"]),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
