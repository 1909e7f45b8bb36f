"""Answers of run/chat.py and run/evaluate.py by transformers' generate() over fake CUDA tensors: all of it is there."""

import pytest
import torch
import toys
from fake_gpu import gpu
from fake_models import TOWERS
from PIL import Image
from transformers import GenerationConfig, GenerationMixin, LlavaConfig, LlavaForConditionalGeneration

from llava_ds.data.sample import Message
from llava_ds.extensions.infer.generate import Prompt, Sampling, greedy_answers, stream
from llava_ds.extensions.infer.load import LoadedModel
from llava_ds.model.open.hf import attention_options

pytestmark = [pytest.mark.cuda]

TOKENS = 3


@pytest.fixture
def loaded(tokenizer, monkeypatch):
    """A LLaVA on the fake GPU, made in there, which stops after some tokens: no end marker is ever read."""
    text = toys.language_model_config()
    config = LlavaConfig(
        text_config=text, vision_config=TOWERS["clip"], image_token_index=3, image_seq_length=9,
        vision_feature_layer=-2, tie_word_embeddings=False,
    )  # fmt: skip

    def make(dtype: torch.dtype) -> LoadedModel:
        with torch.device("cuda"):
            model = LlavaForConditionalGeneration._from_config(config, dtype=dtype, **attention_options(config)).eval()
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        steps = []

        def goes_on(*_: object, **__: object) -> bool:
            steps.append(1)
            return len(steps) % (TOKENS + 1) != 0

        monkeypatch.setattr(GenerationMixin, "_has_unfinished_sequences", goes_on)
        tokenizer.model_max_length = 512
        return LoadedModel(model, tokenizer, (0.5,) * 3, (0.5,) * 3, toys.image_options(), "v1")

    return make


def prompts(folder) -> list[Prompt]:
    Image.new("RGB", (40, 30), "red").save(folder / "a.png")
    image = Prompt((Message("human", "<image>\nWhat is it?"),), (str(folder / "a.png"),))
    return [image, Prompt((Message("human", "yes or no"),), ()), Prompt(image.messages, image.images, blank=True)]


def without_inference_mode(function):
    """The same without gradients only: fake tensors can't be made from the host's in that mode."""
    return torch.no_grad()(function.__wrapped__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_answers_in_a_batch(loaded, dtype, tmp_path):
    with gpu(declared=".*", pageable=True) as rules:
        answers = without_inference_mode(greedy_answers)(loaded(dtype), prompts(tmp_path), max_new_tokens=TOKENS)
    assert [answer.num_tokens for answer in answers] == [0] * 3 and rules.waits  # values that are read are zeros


@pytest.mark.parametrize("sampling", [Sampling(4), Sampling(4, 0.7, 0.9, 5, 1.1, seed=3)])
def test_a_reply_in_a_chat(loaded, sampling, tmp_path):
    with gpu(declared=".*", pageable=True):
        reply = without_inference_mode(stream)(loaded(torch.bfloat16), prompts(tmp_path)[0], sampling)
    assert reply.num_tokens == TOKENS
