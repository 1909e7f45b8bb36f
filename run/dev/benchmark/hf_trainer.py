# B samples of a batch, T tokens of the longest sample, N images
"""Train with transformers' Trainer over DeepSpeed and transformers' own model class, with padding, for the comparison.

Started by the deepspeed launcher with the flags of run/train.py and two more:
  --steps_file FILE.json    output: seconds, loss and gradient norm of every step
  --recompute               use gradient checkpointing
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from benchmark.measured_run import CpuTimes
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from llava_ds.config.arguments import Arguments, trained_parts
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import open_data
from llava_ds.data.step_plan import sample_order
from llava_ds.engine.process_group import init_ranks
from llava_ds.extensions.active import architecture_of
from llava_ds.model.open.folder import take_from_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import first_rank_first, quiet_libraries
from llava_ds.tracking.progress import peak_memory_bytes

# Flags that have the same names in the Trainer.
SAME = (
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "learning_rate",
    "weight_decay", "warmup_steps", "lr_scheduler_type", "max_grad_norm", "seed", "bf16",
)  # fmt: skip


def main(argv: list[str]) -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps_file", type=Path, required=True)
    parser.add_argument("--recompute", action="store_true")
    own, rest = parser.parse_known_args(argv)
    args, _ = take_from_model(parse_arguments(rest)[0])
    ranks = init_ranks()  # like run/train.py: DeepSpeed's collectives are not compiled on CPU
    plan = plan_model(args.model, args.data.model_max_length)
    image_options = plan.tower.image_options(args)
    with first_rank_first(ranks):
        dataset = open_data(args, plan.tokenizer, image_options)
    options = training_arguments(args, own.recompute, on_cpu=ranks.device.type == "cpu")
    # After the options: under ZeRO-3 they make from_pretrained partition every parameter.
    model = AutoModelForImageTextToText.from_pretrained(
        args.model.model_name_or_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    freeze(model, args)
    model.accepts_loss_kwargs = True  # False in Qwen's class, which would average its loss over micro-batches
    clock = Clock()
    statistics = plan.images.mean, plan.images.std
    trainer = Trainer(
        model=model,
        args=options,
        train_dataset=torch.utils.data.Subset(dataset, sample_order(args, dataset, ranks.world_size).epoch(0)),
        data_collator=PaddingCollator(model.config.image_token_id, *statistics, model.config),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    clock.cpu.write(own.steps_file.parent)
    if ranks.is_first:
        rows = {**clock.measured(), "peak_memory_bytes": peak_memory_bytes(ranks.device)}
        own.steps_file.write_text(json.dumps(rows), encoding="utf-8")


def training_arguments(args: Arguments, recompute: bool, on_cpu: bool) -> TrainingArguments:
    """Return the same recipe as TrainingArguments; other settings keep the Trainer's defaults."""
    return TrainingArguments(
        **{name: getattr(args.training, name) for name in SAME},
        deepspeed=args.training.deepspeed_config,
        gradient_checkpointing=recompute,  # non-reentrant by default
        train_sampling_strategy="sequential",  # the samples come in order
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=args.data.dataloader_num_workers or 0,
        use_cpu=on_cpu,
    )


def freeze(model: nn.Module, args: Arguments) -> None:
    """Freeze all parts except those that the flags train."""
    parts, family = trained_parts(args.model), _family_of(model.config)
    vision = "model.vision_tower" if family is None else family.vision
    projector = ["model.multi_modal_projector"] if family is None else family.connector
    model.requires_grad_("language_model" in parts)
    model.get_submodule(vision).requires_grad_("vision_tower" in parts)
    for name in projector:  # it may be inside the tower
        model.get_submodule(name).requires_grad_("projector" in parts)


def _family_of(config: PreTrainedConfig):
    """Return a ready model's family: it locates the model's parts and its processor's inputs."""
    architecture = architecture_of(config)
    return None if architecture is None else architecture.family


class PaddingCollator:
    """Collate a padded batch like LLaVA: to the longest sample, on the right, images normalised.

    A ready model's images have the form of its own processor's output.
    """

    def __init__(
        self, image_token: int, mean: tuple[float, ...], std: tuple[float, ...], config: PreTrainedConfig | None = None
    ) -> None:
        self.image_token, self.config = image_token, config
        self.family = None if config is None else _family_of(config)
        self.mean, self.std = (torch.tensor(values)[:, None, None] * 255 for values in (mean, std))

    def __call__(self, samples: list[LoadedSample]) -> dict[str, torch.Tensor]:
        """Return input_ids, labels, attention_mask (B, T); pixel_values (N, 3, H, W) float32, absent without images."""
        ids = [s.input_ids.masked_fill(s.input_ids == IMAGE_TOKEN_INDEX, self.image_token) for s in samples]
        batch = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "labels": pad_sequence([s.labels for s in samples], batch_first=True, padding_value=IGNORE_INDEX),
            "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        }
        images = [tiles for s in samples for tiles, _ in s.media]
        if images:
            batch["pixel_values"] = (torch.cat(images).float() - self.mean) / self.std
        if images and self.family is not None:
            layouts = [layout for s in samples for _, layout in s.media]
            pixels = self.family.processed(self.config, batch["pixel_values"], layouts)
            batch |= self.family.outer_inputs(self.config, pixels, layouts, batch["input_ids"] == self.image_token)
        return batch


class Clock(TrainerCallback):
    """Records the seconds between step ends, and the Trainer's log of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu = CpuTimes()
        self.logs: list[dict] = []

    def on_step_end(self, args, state, control, **_) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.tick()

    on_train_begin = on_step_end

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if "loss" in logs:
            self.logs.append(logs)

    def measured(self) -> dict[str, list[float]]:
        """Return a value per step for each measurement."""
        return {
            "step_time_s": [end - start for start, end in itertools.pairwise(self.ends)],
            **{name: [row[name] for row in self.logs] for name in ("loss", "grad_norm")},
        }


if __name__ == "__main__":
    main(sys.argv[1:])
    torch.distributed.destroy_process_group()
