"""Questions for a model in training are what samples are up to their first answer."""

import torch
import toys

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.engine.runner import Direct
from llava_ds.extensions.samples.sampled_answers import Decoding, answers, prompts_of
from llava_ds.runtime.ranks import Ranks


def test_a_prompt_ends_where_the_first_answer_begins(tmp_path, tokenizer):
    data = toys.write_data(tmp_path / "data", "itti")
    dataset = toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    prompts = prompts_of(dataset, 3, tokenizer, "v1")
    assert [prompt.index for prompt in prompts] == [0, 3, 1]  # those with images first
    for prompt in prompts:
        assert prompt.id == str(dataset.row(prompt.index)["id"])
        sample, ids = dataset[prompt.index], prompt.sample.input_ids
        assert sample.input_ids[: len(ids)].tolist() == ids.tolist()
        assert (sample.labels[: len(ids)] == IGNORE_INDEX).all() and sample.labels[len(ids)] != IGNORE_INDEX
        assert prompt.question.startswith("USER:") and prompt.question.endswith("ASSISTANT:")
        assert prompt.reference and prompt.reference in toys.ANSWERS
        places = int((ids == IMAGE_TOKEN_INDEX).sum())
        assert places == sum(layout.num_tokens for _, layout in prompt.sample.media)
        assert len(prompt.images) == len(prompt.sample.media) == (prompt.index in (0, 3))


class Repeating:
    """An engine whose model says one token for ever, and has positions up to the longest conversation it has seen."""

    def __init__(self, token: int) -> None:
        self.token, self.longest = token, 0

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def __call__(self, batch, head):
        self.longest = max(self.longest, batch.max_seqlen)
        return torch.nn.functional.one_hot(torch.full_like(head.at, self.token), 400).float()


def test_no_answer_goes_on_behind_the_length_of_samples(tmp_path, tokenizer):
    data = toys.write_data(tmp_path / "data", "itti")
    dataset = toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    prompts, alone = prompts_of(dataset, 2, tokenizer, "v1"), Ranks(0, 0, 1, torch.device("cpu"))
    lengths = [len(prompt.sample.input_ids) for prompt in prompts]
    [token] = tokenizer("yes", add_special_tokens=False).input_ids[-1:]
    engine, limit = Repeating(token), max(lengths) + 3
    answers(Direct(engine), prompts, Decoding(tokenizer, "v1", dataset.image_options, 5, limit), alone)
    # The last token of an answer is not read again.
    assert engine.longest == max(length + min(5, limit - length) - 1 for length in lengths) < limit
