"""Apply Liger's kernels to each language model that trains, and refuse the flag if they can't run."""

import importlib.util
from collections.abc import Iterator

from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.base import Extension, Wrap
from llava_ds.extensions.liger.kernels import FLAG, use_liger
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.ranks import Ranks


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for missing packages, or a missing GPU."""
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{FLAG} needs {' and '.join(missing)}: install the extra llava_ds[liger]"
    elif resolved.device_type != "cuda":
        yield f"{FLAG} needs a GPU, this is {resolved.device_type}: remove it"


class Kernels(Wrap):
    """Replaces forwards in the language model."""

    def kernels(self, model: LlavaModel, plan: ModelPlan, resolved: ResolvedConfig, ranks: Ranks) -> list[str]:
        return use_liger(model.language_model, plan.text_config, ranks.device, resolved.dtype)


extension = Extension(check=check, wrap=Kernels())
