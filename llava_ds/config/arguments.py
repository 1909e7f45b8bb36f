"""The flags of a training run: LLaVA's and Hugging Face's names, in three frozen sections. parsing.py reads them."""

import dataclasses
from dataclasses import dataclass

from llava_ds.config.data_flags import DataArguments
from llava_ds.config.flags import Flag
from llava_ds.config.model_flags import (
    ModelArguments,
    changes_base,
    lora_parts,
    trained_parts,
    trains_new_rows,
    trains_projector_only,
)
from llava_ds.config.training_flags import TrainingArguments, ranks_per_sample, steps_go_across_epochs

__all__ = [
    "FLAGS",
    "SECTIONS",
    "Arguments",
    "DataArguments",
    "ModelArguments",
    "TrainingArguments",
    "changes_base",
    "flag_default",
    "flags_free_on_resume",
    "lora_parts",
    "ranks_per_sample",
    "steps_go_across_epochs",
    "trained_parts",
    "trains_new_rows",
    "trains_projector_only",
    "with_objective_defaults",
]

SECTIONS = (ModelArguments, DataArguments, TrainingArguments)
FLAGS: dict[str, Flag] = {
    field.name: field.metadata["flag"] for section in SECTIONS for field in dataclasses.fields(section)
}


@dataclass(frozen=True)
class Arguments:
    """All sections, and the names of the flags that the user wrote (command line or recipe)."""

    model: ModelArguments
    data: DataArguments
    training: TrainingArguments
    given: frozenset[str]

    def replaced(self, **values: object) -> "Arguments":
        """A copy in which every named flag has another value, in whichever section it is."""
        sections = {}
        for section in ("model", "data", "training"):
            part = getattr(self, section)
            names = {field.name for field in dataclasses.fields(part)}
            sections[section] = dataclasses.replace(part, **{k: v for k, v in values.items() if k in names})
        return dataclasses.replace(self, **sections)

    def as_dict(self) -> dict[str, object]:
        """Every flag and its value."""
        return {**dataclasses.asdict(self.model), **dataclasses.asdict(self.data), **dataclasses.asdict(self.training)}

    def same_on_every_rank(self) -> dict[str, object]:
        """The flags whose value no rank may have differently: all but paths and those of a machine, by their name."""
        return {
            f"--{name}": value
            for name, value in self.as_dict().items()
            if FLAGS[name].path is None and not FLAGS[name].per_machine
        }


def with_objective_defaults(args: Arguments) -> Arguments:
    """The flags whose default is another one for each objective, filled in."""
    beta, loss_type = dict.fromkeys(("grpo", "ppo"), (0.0, "dapo")).get(args.training.objective, (0.1, "sigmoid"))
    training = args.training
    return args.replaced(
        beta=beta if training.beta is None else training.beta, loss_type=training.loss_type or loss_type
    )


def flags_free_on_resume(rewinds: bool = False) -> set[str]:
    """Names of the flags that a resumed run may change freely. rewinds: whether --on_loss_spike is rewind."""
    return {name for name, flag in FLAGS.items() if flag.resume == "free" or (flag.resume == "rewind" and not rewinds)}


def flag_default(name: str) -> object:
    """The value of a flag that is not given; None for a name that is no flag."""
    return next((getattr(section, name) for section in SECTIONS if hasattr(section, name)), None)
