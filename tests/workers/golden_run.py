"""run/train.py of a checkout, noting what a rebuild may not change: parameter groups and the first batches' tensors.

Arguments: the checkout, the file to write (rank 0), and the flags of the run.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

checkout, out, *flags = sys.argv[1:] if not sys.argv[1].startswith("--local_rank") else sys.argv[2:]
sys.path.insert(0, checkout)


def digest(value: object) -> object:
    """A value of a batch: tensors by shape and a hash of their bits."""
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().view(torch.uint8) if value.numel() else value.cpu()
        return [str(value.dtype), list(value.shape), hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]]
    if dataclasses.is_dataclass(value):
        return {field.name: digest(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: digest(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): digest(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [digest(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def tensors_in(value: object) -> list[object]:
    """The digests of all tensors of a batch, wherever they lie in it, in an order that no field's name decides."""
    if isinstance(value, dict):
        return sorted((one for each in value.values() for one in tensors_in(each)), key=json.dumps)
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and value[0].startswith("torch."):
        return [value]
    return [one for each in value for one in tensors_in(each)] if isinstance(value, list) else []


def main() -> None:
    spec = importlib.util.spec_from_file_location("train", f"{checkout}/run/train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    import deepspeed

    noted: dict[str, object] = {"batches": []}
    original = deepspeed.initialize

    def initialize(*args, **kwargs):
        groups = kwargs.get("model_parameters") or []
        names = {id(parameter): name for name, parameter in kwargs["model"].named_parameters()}
        noted["groups"] = [
            {
                **{key: value for key, value in group.items() if key != "params" and isinstance(value, (int, float))},
                "params": [[names.get(id(p)), list(getattr(p, "ds_shape", p.shape))] for p in group["params"]],
            }
            for group in groups
            if isinstance(group, dict)
        ]
        engine, *rest = original(*args, **kwargs)
        engine.module.register_forward_pre_hook(note_batch, with_kwargs=True)
        return engine, *rest

    def note_batch(module, args, kwargs):
        if len(noted["batches"]) < 4:
            given = [*args, *kwargs.values()]
            noted["batches"].append(tensors_in([digest(value) for value in given]))

    deepspeed.initialize = initialize
    code = train.main(flags)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(noted))
    torch.distributed.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
