"""Ask models the same through transformers alone and through DeepSpeed's engine on all ranks that were started.

FILE.json holds cases: name, folder, engine options, data_path, image_folder, number of questions, longest answer.
Rank 0 prints a line of JSON for each: what both answered and how far their scores lie apart, or what was refused.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from llava_ds.constants import ConfigError
from llava_ds.engine.process_group import init_ranks
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.engines import EngineOptions, load_for_inference
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.runtime.ranks import quiet_libraries


class Scores(LogitsProcessor):
    """Keeps the scores of every step of every batch, and the tokens before it."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] == 0:
            self.batches.append([])
        self.batches[-1].append((input_ids.cpu(), scores.float().cpu()))
        return scores


def asked(loaded: LoadedModel, prompts: list[Prompt], **options: int) -> tuple[list[str], Scores]:
    """The answers, and the scores from which their tokens were chosen."""
    scores = Scores()
    processors = LogitsProcessorList([*loaded.generating.get("logits_processor", []), scores])
    return answer(replace(loaded, generating={"logits_processor": processors}), prompts, **options), scores


def difference(found: Scores, expected: Scores) -> float:
    """The largest between scores behind the same tokens, relative to the largest of them all.

    Who takes another token there had two within twice as much.
    """
    worst = largest = 0.0
    for batch, other in zip(found.batches, expected.batches, strict=True):
        for (ids, scores), (other_ids, others) in zip(batch, other):
            same = (ids == other_ids).all(1)
            worst = max([worst, *(scores - others)[same].abs().amax(1).tolist()])
            largest = max(largest, float(others.abs().max()))
    return worst / largest


def main() -> None:
    [listed] = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    quiet_libraries()
    ranks = init_ranks()
    for case in json.loads(Path(listed).read_text(encoding="utf-8")):
        given = Given(case["data_path"], image_folder=case["image_folder"])
        questions = read_questions("llava", given, case["questions"])
        prompts = [question.prompt for question in questions]
        options = {"batch_size": 20, "max_new_tokens": case["max_new_tokens"]}
        plain = load_for_inference(case["folder"], EngineOptions(dtype=case["options"].get("dtype", "auto")))
        answers, expected = asked(plain, prompts, **options)
        line = {"name": case["name"], "hf": answers}
        try:
            loaded = load_for_inference(case["folder"], EngineOptions("deepspeed", **case["options"]), ranks)
            tower = loaded.model.model.vision_tower
            line["tower"] = sum(getattr(p, "ds_numel", p.numel()) for p in tower.parameters())
            decoder = next(m for m in loaded.model.model.language_model.modules() if isinstance(m, nn.ModuleList))
            line["decoder"] = sum(getattr(p, "ds_numel", p.numel()) for p in decoder.parameters())
            line["deepspeed"], found = asked(loaded, prompts, **options)
            line["difference"] = difference(found, expected)
        except ConfigError as error:
            line["refused"] = str(error)
        if ranks.is_first:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
