"""The identity of a run: all settings that must match when a later start resumes from its checkpoint."""

import dataclasses
import hashlib
from pathlib import Path

from llava_ds.checkpoint import commit
from llava_ds.config.arguments import Arguments, flags_free_on_resume
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import DataError
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.extensions.active import plugins
from llava_ds.files.writing import sha256

SETTINGS = ("config.json", "adapter_config.json")  # a model folder has at least one of these files

# Sections of the DeepSpeed JSON that affect the trained model; all others affect only speed or placement.
DECIDING_SECTIONS = (
    "optimizer", "scheduler", "bf16", "fp16", "torch_autocast", "data_types", "communication_data_type",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """All settings that must match for a resumed run to train the same model."""

    flags: dict[str, object]
    data: str  # fingerprint of the encoded samples
    world_size: int
    zero_stage: int
    deepspeed: dict[str, object]  # the DECIDING_SECTIONS of the DeepSpeed JSON
    optimizer_on_nvme: bool = False

    @classmethod
    def of(cls, args: Arguments, data: str, world_size: int, ds_config: dict) -> "RunIdentity":
        free = flags_free_on_resume(args.flags, rewinds=args.rewinds)
        flags = {name: value for name, value in args.as_dict().items() if name not in free}
        if variables := args.model.chat_template_kwargs:
            from llava_ds.template_variables import parse_variables

            flags["chat_template_kwargs"] = parse_variables(variables)
        # Compare the files' contents instead of their paths.
        projector = args.model.pretrain_mm_mlp_adapter
        flags["pretrain_mm_mlp_adapter"] = projector and sha256(Path(projector))
        for name in ("model_name_or_path", "model_base"):
            folder = getattr(args.model, name)
            flags[name] = folder and folder_digest(Path(folder))
        flags["vision_tower"] = towers_digest(args.model.vision_tower)
        flags |= {name: folder_digest(folder) for name, folder in args.own_models.items()}
        flags["plugin"] = ", ".join(f"{name} (sha256 {digest})" for name, digest in plugins().items()) or None
        for own in args.own.values():
            flags |= own.identity()
        zero_stage = ds_config["zero_optimization"].get("stage", 0)
        deciding = {key: ds_config.get(key) for key in DECIDING_SECTIONS}
        on_nvme = offload_device(ds_config, "offload_optimizer") == "nvme"
        return cls(flags, data, world_size, zero_stage, deciding, on_nvme)


def folder_digest(folder: Path) -> str:
    """Hash a model folder's settings and the names and sizes of its weight files, without reading the weights."""
    weights = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]
    listed = sorted((path.name, path.stat().st_size) for path in weights)
    settings = [file.read_bytes() for name in SETTINGS if (file := folder / name).is_file()]
    return hashlib.sha256(repr((*settings, listed)).encode()).hexdigest()


def towers_digest(vision_tower: str | None) -> str | None:
    """Return the digests of --vision_tower's folders, or None."""
    return ",".join(folder_digest(Path(folder)) for folder in tower_folders(vision_tower)) or None


def saved_identity(resume: str, output_dir: Path) -> dict[str, object]:
    """Read the identity of the run in the newest checkpoint for --resume; {} for a fresh start.

    The checkpoint's files are not verified. Use this only for values that a run chose automatically and has to keep.
    """
    paths = {"auto": commit.checkpoints(output_dir), "never": []}.get(resume, [Path(resume)])
    for path in paths:
        from llava_ds.checkpoint.trainer_file import read_trainer

        try:
            return read_trainer(path)["identity"]
        except DataError:
            continue  # damaged; find_resume_point refuses it with a message
    return {}
