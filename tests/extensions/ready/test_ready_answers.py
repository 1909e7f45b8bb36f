"""Answers that a run draws from a ready model by its own modules are those of transformers' class."""

import numpy as np
import pytest
import ready_models
import torch
import toys
from ready_models import FAMILIES

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.collate import LoadedSample
from llava_ds.data.end_markers import end_markers
from llava_ds.data.sample import Message
from llava_ds.extensions.infer.generate import Prompt, answer, decode_media, media_of
from llava_ds.extensions.infer.load import load_model
from llava_ds.model.llava import assemble
from llava_ds.model.open.loading import load_weights
from llava_ds.model.open.model_plan import open_part, plan_model
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers
from llava_ds.train.evaluating.twin import make_twin

TOKENS, TOGETHER = 6, 10
QUICK = "qwen3_vl"  # three axes of positions, and features for later layers
QUESTIONS = ("What is it?", "Which of these two is it then?", "What?", "Is it a red cat, or a blue dog, or none?")


def prompts_of(number: int, folder: str) -> list[Prompt]:
    """Prompts of different lengths with no, one or two of three images."""
    rng = np.random.default_rng(8)
    for i in range(number):
        images = [f"{folder}/{n}.png" for n in rng.integers(0, 3, (1, 2, 0)[i % 3])]
        words = " ".join(rng.choice(QUESTIONS, rng.integers(1, 4)))
        yield Prompt((Message("human", "<image>\n" * len(images) + words),), tuple(images))


@pytest.mark.parametrize(
    ("family", "number"), [(QUICK, 3), *(pytest.param(one, 200, marks=pytest.mark.long) for one in FAMILIES)]
)
def test_drawn_answers_are_transformers(family, number, tmp_path):
    """Of prompts of different lengths together."""
    given = ready_models.write_ready(tmp_path / "base", family)
    args = ModelArguments(**given, version="processor")
    prompts = list(prompts_of(number, toys.write_data(tmp_path / "data", "iii")["image_folder"]))
    loaded = load_model(tmp_path / "base")
    expected = answer(loaded, prompts, max_new_tokens=TOKENS)

    plan = plan_model(args, 512)
    options = plan.tower.image_options(Arguments(args, DataArguments(), TrainingArguments(), frozenset()))
    mean, std = (torch.tensor(values) for values in (plan.images.mean, plan.images.std))
    model = assemble(plan.text_config, plan.tower, args, mean, std)
    for name, part in model.named_children():
        load_weights(part, open_part(name, plan).weights, Ranks(0, 0, 1, torch.device("cpu")), "here")
    encoder, samples = loaded.encoder, []
    for prompt in prompts:
        media = media_of(prompt, options)
        ids = torch.tensor(encoder.prompt_ids(prompt.messages, [layout.mark for *_, layout in media]))
        samples.append(LoadedSample(ids, ids, decode_media(media, False, options)))
    ends = tuple(end_markers("processor", plan.tokenizer))
    rules = DrawRules(1, TOKENS, 2048, ends, options, top_k=1)
    twin, found = make_twin(model), []
    for first in range(0, number, TOGETHER):
        some = samples[first : first + TOGETHER]
        drawn = draw_answers(twin, some, [np.zeros((1, TOKENS))] * len(some), rules)
        found += [plan.tokenizer.decode(one.ids, skip_special_tokens=True).strip() for [one] in drawn]
    assert found == expected and len(set(found)) > 1
