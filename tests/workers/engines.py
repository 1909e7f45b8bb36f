"""Ask models the same through transformers alone and through DeepSpeed's engine on all ranks that were started.

FILE.json holds cases: name, folder, engine options, data_path, image_folder, number of questions, longest answer.
Rank 0 prints a line of JSON for each: what both answered, or what was refused.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.distributed import init_ranks, quiet_libraries
from llava_ds.evaluation.files import Given
from llava_ds.evaluation.tasks import read_questions
from llava_ds.infer.engines import EngineOptions, load_for_inference
from llava_ds.infer.generate import answer
from llava_ds.infer.load import LoadedModel


@torch.inference_mode()
def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of a few numbers in the place of embeddings, the same every time."""
    width = loaded.model.config.get_text_config().hidden_size
    embeds = torch.randn(2, 30, width, generator=torch.Generator().manual_seed(0)).to(loaded.model.dtype)
    return loaded.model(inputs_embeds=embeds.to(loaded.device)).logits.float().cpu()


def main() -> None:
    [listed] = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    quiet_libraries()
    ranks = init_ranks()
    for case in json.loads(Path(listed).read_text(encoding="utf-8")):
        given = Given(case["data_path"], image_folder=case["image_folder"])
        questions = read_questions("llava", given, case["questions"])
        prompts = [question.prompt for question in questions]
        asked = {"batch_size": 20, "max_new_tokens": case["max_new_tokens"]}
        dtype = case["options"].get("dtype", "auto")
        plain = load_for_inference(case["folder"], EngineOptions(dtype=dtype))
        line = {"name": case["name"], "hf": answer(plain, prompts, **asked)}
        expected = logits(plain)
        try:
            loaded = load_for_inference(case["folder"], EngineOptions("deepspeed", **case["options"]), ranks)
            tower = loaded.model.model.vision_tower
            line["tower"] = sum(getattr(p, "ds_numel", p.numel()) for p in tower.parameters())
            decoder = next(m for m in loaded.model.model.language_model.modules() if isinstance(m, nn.ModuleList))
            line["decoder"] = sum(getattr(p, "ds_numel", p.numel()) for p in decoder.parameters())
            line["deepspeed"] = answer(loaded, prompts, **asked)
            found = logits(loaded)
            line["difference"] = float((found - expected).abs().max() / expected.abs().max())
        except ConfigError as error:
            line["refused"] = str(error)
        if ranks.is_first:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
