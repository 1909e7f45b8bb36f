"""The identity of a run: everything that has to match for another start to resume its checkpoint."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

from llava_ds.checkpoint import commit
from llava_ds.config.arguments import Arguments, declared_in, every_flag, flag_default, flags_free_on_resume
from llava_ds.config.flags import Flag
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import DataError
from llava_ds.engine.ds_config.optimizer import optimizer_name
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.files.writing import sha256

# Orders of LLaVA-NeXT's sampler, and the layout flag that decides which samples their steps take.
ORDERED_BY_LAYOUT = {
    "group_by_length": "per_device_train_batch_size",
    "group_by_modality_length_auto": "per_device_train_batch_size",
    "group_by_varlen": "gradient_accumulation_steps",
}

SETTINGS = ("config.json", "adapter_config.json")  # a model's folder has at least one of these

# Sections of the DeepSpeed JSON that change the result; the others change speed or placement.
DECIDING_SECTIONS = (
    "optimizer", "scheduler", "bf16", "fp16", "torch_autocast", "data_types", "communication_data_type",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Everything that has to match for a resumed run to end in the same model."""

    flags: dict[str, object]
    data: str  # fingerprint of the encoded samples
    world_size: int
    zero_stage: int
    deepspeed: dict[str, object]  # settings of the DeepSpeed JSON without a flag that change the result
    optimizer_on_nvme: bool = False

    @classmethod
    def of(cls, args: Arguments, data: str, world_size: int, ds_config: dict) -> "RunIdentity":
        free = flags_free_on_resume(args.flags, rewinds=args.rewinds)
        flags = {name: value for name, value in args.as_dict().items() if name not in free}
        if variables := args.model.chat_template_kwargs:
            from llava_ds.template_variables import parse_variables

            flags["chat_template_kwargs"] = parse_variables(variables)
        # The content at a path is compared, not the path.
        projector = args.model.pretrain_mm_mlp_adapter
        flags["pretrain_mm_mlp_adapter"] = projector and sha256(Path(projector))
        for name in ("model_name_or_path", "model_base"):
            folder = getattr(args.model, name)
            flags[name] = folder and folder_digest(Path(folder))
        flags["vision_tower"] = towers_digest(args.model.vision_tower)
        flags |= {name: folder_digest(folder) for name, folder in args.own_models.items()}
        for own in args.own.values():
            flags |= own.identity()
        zero_stage = ds_config["zero_optimization"].get("stage", 0)
        deciding = {key: ds_config.get(key) for key in DECIDING_SECTIONS}
        on_nvme = offload_device(ds_config, "offload_optimizer") == "nvme"
        return cls(flags, data, world_size, zero_stage, deciding, on_nvme)

    def differences(self, saved: dict) -> dict[str, str]:
        """Return the differences to a saved identity (from JSON) that lead to another model.

        Returns a line each, by its name for --allow_changed_flags.
        """
        # A flag that one identity lacks counts as its default there: an extension was not loaded, or an earlier version
        # did not have the flag.
        absent, flags = saved["flags"].keys() - self.flags.keys(), every_flag()
        layout = self._layout_flags(saved)
        left_out = [
            name for name in saved["flags"] if name in absent & flags.keys() and flags[name].resume == "compared"
        ]
        layout = self._layout_flags(saved)
        lines = {
            name: f"--{name} is {value}, was {before}"
            for name, value in [*self.flags.items(), *((name, flag_default(name)) for name in left_out)]
            if (before := saved["flags"].get(name, flag_default(name))) != value
            and (name not in layout or name in self._ordering_flags)
        }
        if saved["data"] != self.data:
            lines["data"] = "the data set or its encoding has changed"
        for key, line in self._section_changes(saved).items():
            if key != "optimizer" or _optimizer_of(vars(self)) != _optimizer_of(saved):
                lines[key] = f"{lines[key]}; {line}" if key in lines else line
        by_layout = ", ".join(self._depend_on_layout)
        return lines | {
            name: f"{line}; this changes the result with {by_layout}"
            for name, line in self._layout_changes(saved).items()
            if self._decides(name, saved)
        }

    def reshaped(self, saved: dict) -> list[str]:
        """Return the differences to a saved identity that change no more than rounding, a line each."""
        changes = self._layout_changes(saved).items()
        lines = [line for name, line in changes if name not in self._ordering_flags and not self._decides(name, saved)]
        if saved["zero_stage"] != self.zero_stage:
            lines.append(f"zero_stage is {self.zero_stage}, was {saved['zero_stage']}")
        if _optimizer_of(vars(self)) == _optimizer_of(saved):
            lines += [line for key, line in self._section_changes(saved).items() if key == "optimizer"]
        return lines

    def _section_changes(self, saved: dict) -> dict[str, str]:
        return {
            key: f"{key} in the DeepSpeed JSON is {json.dumps(value)}, was {json.dumps(before)}"
            for key, value in self.deepspeed.items()
            if (before := saved.get("deepspeed", {}).get(key)) != value
        }

    @property
    def _depend_on_layout(self) -> list[str]:
        """The given flags that make the loss, or the samples of a step, depend on ranks and micro-batches."""
        depend = {
            "--loss_reduction micro_batch": self.flags["loss_reduction"] == "micro_batch",
            "--steps_across_epochs": self.flags["steps_across_epochs"],
        }
        declared = declared_in(self.flags)
        for name in (name for name, flag in declared.items() if flag.of_micro_batch and name in self.flags):
            depend[f"--{name}"] = self.flags[name] != flag_default(name)
        return [flag for flag, is_given in depend.items() if is_given]

    def _decides(self, name: str, saved: dict) -> bool:
        """Return True if a change of layout leads to another model. Ranks that share samples compute the same loss."""
        same_ranks = name == "world_size" and data_ranks(saved) == data_ranks(vars(self))
        flag = self._layout_flags(saved).get(name)
        same_samples = same_ranks or (flag is not None and (flag.shares_samples or flag.resume == "placement"))
        return bool(self._depend_on_layout) and not same_samples

    @property
    def _ordering_flags(self) -> set[str]:
        """Layout flags that decide which samples the order takes for a step."""
        return {flag for order, flag in ORDERED_BY_LAYOUT.items() if self.flags[order]}

    def _layout_flags(self, saved: dict) -> dict[str, Flag]:
        """Return the flags that only decide on which rank and in which micro-batch a sample is computed."""
        declared = declared_in(self.flags.keys() | saved["flags"].keys())
        return {name: flag for name, flag in declared.items() if flag.resume in ("layout", "placement")}

    def _layout_changes(self, saved: dict) -> dict[str, str]:
        lines = {
            name: f"--{name} is {value}, was {before}"
            for name in self._layout_flags(saved)
            if (before := saved["flags"].get(name, flag_default(name)))
            != (value := self.flags.get(name, flag_default(name)))
        }
        if saved["world_size"] != self.world_size:
            lines["world_size"] = f"world_size is {self.world_size}, was {saved['world_size']}"
        return lines


def data_ranks(identity: dict) -> int:
    """Return the number of an identity's ranks with samples of their own."""
    flags = identity["flags"]
    shared = (flags.get(name, 1) for name, flag in declared_in(flags).items() if flag.shares_samples)
    return identity["world_size"] // math.prod(shared)


def _optimizer_of(identity: dict) -> dict | None:
    """Return an identity's optimizer block; None for AdamW with the flags' numbers.

    None covers both DeepSpeed's AdamW for states in CPU memory and torch's.
    """
    block, flags = identity.get("deepspeed", {}).get("optimizer"), identity["flags"]
    if block is None or optimizer_name(block) not in ("Adam", "AdamW"):
        return block
    params = dict(block.get("params", {}))
    by_flags = {
        "lr": flags.get("learning_rate"),
        "weight_decay": flags.get("weight_decay"),
        "betas": [flags.get("adam_beta1"), flags.get("adam_beta2")],
        "eps": flags.get("adam_epsilon"),
    }
    decoupled = params.pop("adam_w_mode", True)
    params.pop("torch_adam", None)
    if isinstance(params.get("betas"), tuple):
        params["betas"] = list(params["betas"])
    return None if decoupled and params == by_flags else block


def folder_digest(folder: Path) -> str:
    """Hash a model folder's settings and its weight files' names and sizes (not gigabytes of weights)."""
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]
    listed = sorted((path.name, path.stat().st_size) for path in weights)
    settings = [file.read_bytes() for name in SETTINGS if (file := folder / name).is_file()]
    return hashlib.sha256(repr((*settings, listed)).encode()).hexdigest()


def towers_digest(vision_tower: str | None) -> str | None:
    """Return the digests of --vision_tower's folders, or None."""
    return ",".join(folder_digest(Path(folder)) for folder in tower_folders(vision_tower)) or None


def saved_identity(resume: str, output_dir: Path) -> dict[str, object]:
    """Read the identity in the newest checkpoint that a resume could use; {} for a fresh start.

    The checkpoint is not verified: this is for values that a run chose for itself and has to keep.
    """
    paths = {"auto": commit.checkpoints(output_dir), "never": []}.get(resume, [Path(resume)])
    for path in paths:
        from llava_ds.checkpoint.trainer_file import read_trainer

        try:
            return read_trainer(path)["identity"]
        except DataError:
            continue  # damaged; find_resume_point refuses it with a message
    return {}
