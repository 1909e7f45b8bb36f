"""The mlp_tiles extension: applied to each language model that trains."""

from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.base import Extension, Wrap
from llava_ds.extensions.mlp_tiles.tiles import tile_mlps
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.ranks import Ranks


class Tiles(Wrap):
    """Replaces forwards of MLPs."""

    def kernels(self, model: LlavaModel, plan: ModelPlan, resolved: ResolvedConfig, ranks: Ranks) -> list[str]:
        return [tile_mlps(model.language_model, resolved.args.own["mlp_tiles"].mlp_tile_tokens)]


extension = Extension(wrap=Tiles())
