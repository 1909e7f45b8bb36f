"""What a long sample keeps for backward on a rank that has all of it, and on ranks that share it.

Last arguments: a folder of toys.write_base and the number of tokens. Rank 0 prints JSON: bytes kept alone, and by each
rank.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.engine.construct import build_model
from llava_ds.engine.process_group import init_ranks
from llava_ds.extensions.base import Axis
from llava_ds.extensions.sequence_parallel.cut import cut
from llava_ds.extensions.sequence_parallel.shared_tokens import share_tokens
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import gather


def kept_bytes(model: torch.nn.Module, batch) -> int:
    """Bytes of all storages that forward saves, but parameters; backward runs, too."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch)
    loss.backward()
    return sum(kept.values())


def main() -> None:
    folder, num_tokens = Path(sys.argv[-2]), int(sys.argv[-1])
    ranks = init_ranks()
    args = ModelArguments(model_name_or_path=str(folder / "llama"), vision_tower=str(folder / "clip"))
    # Ranks that share samples compute the last layer at all positions.
    plan = dataclasses.replace(plan_model(args, num_tokens), whole_last_layer="as on several ranks")
    config = {"zero_optimization": {"stage": 0}}
    model = build_model(plan, args, config, torch.float32, 42, ranks)
    model.vision_tower.requires_grad_(False)
    options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean)
    layout = media_layout("image", ((30, 30),), 1, options)
    image = torch.zeros(layout.num_tiles, 3, options.size, options.size, dtype=torch.uint8)
    ids = torch.full((num_tokens,), 5)
    ids[1 : 1 + layout.num_tokens] = IMAGE_TOKEN_INDEX
    labels = torch.where(torch.arange(num_tokens) < num_tokens // 2, -100, ids)
    whole = collate([LoadedSample(ids, labels, [(image, layout)])], options)
    alone = kept_bytes(model, whole)

    place = Mesh.of(ranks, [Axis("sp", "sequence_parallel_size", ranks.world_size, 1, divides_model=False)]).at("sp")
    share_tokens(model, place.group)
    part, tiles = cut(whole, options, [layout], place.index, place.size)
    pixels = whole.pixel_values[tiles] if tiles else torch.zeros_like(image[:1])
    part = dataclasses.replace(part, pixel_values=pixels)
    shared = gather(kept_bytes(model, part), ranks)
    if ranks.is_first:
        print(json.dumps({"alone": alone, "shared": shared}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
