"""Questions for a model in training are what samples are up to their first answer."""

import toys

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.train.held_out import prompts_of


def test_a_prompt_ends_where_the_first_answer_begins(tmp_path, tokenizer):
    data = toys.write_data(tmp_path / "data", "itti")
    dataset = toys.encoded(**data, tokenizer=tokenizer, cache_dir=tmp_path / "cache")
    prompts = prompts_of(dataset, 3, tokenizer, "v1")
    assert [prompt.id for prompt in prompts] == [str(dataset.row(i)["id"]) for i in range(3)]
    for index, prompt in enumerate(prompts):
        sample, ids = dataset[index], prompt.sample.input_ids
        assert sample.input_ids[: len(ids)].tolist() == ids.tolist()
        assert (sample.labels[: len(ids)] == IGNORE_INDEX).all() and sample.labels[len(ids)] != IGNORE_INDEX
        assert prompt.question.startswith("USER:") and prompt.question.endswith("ASSISTANT:")
        assert prompt.reference and prompt.reference in toys.ANSWERS
        places = int((ids == IMAGE_TOKEN_INDEX).sum())
        assert places == sum(layout.num_tokens for _, layout in prompt.sample.media)
        assert len(prompt.images) == len(prompt.sample.media) == (index == 0)
