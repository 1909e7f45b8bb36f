"""The client of run/vllm_server.py and the server itself, over a stand-in for vLLM."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from fake_vllm import LOG_PROB, serving
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError, DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.extensions.rl.vllm_client import VllmServer, with_one_token_an_image
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import DrawRules

ONE = Ranks(0, 0, 1, torch.device("cpu"))
EXPORT = SimpleNamespace(form="hf", image_options=toys.image_options())
RULES = DrawRules(3, 4, 20, (2, 9), toys.image_options(), temperature=0.7, top_k=0, top_p=0.9)
SEEDS = [(42, 1, 0, 0), (42, 1, 5, 0)]


def sample(*parts: int | str) -> LoadedSample:
    """Tokens, and images of three features for every "i"."""
    ids, media = [], []
    for part in parts:
        ids += [IMAGE_TOKEN_INDEX] * 3 if part == "i" else [part]
        media += [(torch.zeros(1), SimpleNamespace(num_tokens=3))] if part == "i" else []
    ids = torch.tensor(ids)
    return LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), media)


@pytest.fixture
def client(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps({"image_token_index": 399}))
    with serving("start") as (url, stand_in):
        yield VllmServer(url, tmp_path / "weights", EXPORT, ONE), stand_in


def test_one_token_stands_for_each_image():
    """Also of two that stand side by side."""
    assert with_one_token_an_image(sample(4, "i", "i", 5, 6, "i"), 399) == [4, 399, 399, 5, 6, 399]
    assert with_one_token_an_image(sample(4, 5), 399) == [4, 5]


def test_answers_come_by_prompt_with_their_log_probabilities(client, tmp_path):
    server, stand_in = client
    Image.new("RGBA", (6, 4), (255, 0, 0, 255)).save(tmp_path / "red.png")
    prompts = [sample(4, "i", 5), sample(*range(10, 28))]
    found = server.draw(prompts, [[str(tmp_path / "red.png")], []], SEEDS, RULES)
    assert [len(answers) for answers in found] == [3, 3]
    assert all(len(one.ids) <= 2 for one in found[1])  # of 20 tokens 18 are the prompt's
    for answers in found:
        for one in answers:
            assert one.log_probs == (LOG_PROB,) * len(one.ids) and one.entropy == -LOG_PROB * len(one.ids)
            assert one.ended == (one.ids[-1] == 2)
    asked = [prompt for prompt, _ in stand_in.asked]
    assert asked[0]["prompt_token_ids"] == [4, 399, 5] and "multi_modal_data" not in asked[3]
    [image] = asked[0]["multi_modal_data"]["image"]
    assert image.size == (6, 4) and image.getpixel((0, 0)) == (255, 0, 0)
    rules = [params for _, params in stand_in.asked]
    assert {(r.temperature, r.top_p, r.top_k, tuple(r.stop_token_ids)) for r in rules} == {(0.7, 0.9, -1, (2, 9))}
    assert [r.max_tokens for r in rules] == [4, 4, 4, 2, 2, 2] and len({r.seed for r in rules}) == 6
    again = server.draw(prompts[1:], [[]], SEEDS[1:], RULES)
    assert again[0] == found[1]  # whatever is drawn beside them


def test_what_goes_wrong_is_said(client, tmp_path):
    server, stand_in = client
    stand_in.generate = lambda *_, **__: 1 / 0
    with pytest.raises(DataError, match="failed at /draw: ZeroDivisionError"):
        server.draw([sample(4)], [[]], SEEDS[:1], RULES)
    gone = VllmServer("http://127.0.0.1:9", tmp_path / "weights", EXPORT, ONE)
    with pytest.raises(DataError, match=r"does not answer .* start python run/vllm_server.py"):
        gone.draw([sample(4)], [[]], SEEDS[:1], RULES)
    with pytest.raises(ConfigError, match="transformers' format"):
        VllmServer("http://127.0.0.1:9", tmp_path, SimpleNamespace(form="llava"), ONE)


def test_images_are_sent_whole(client, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "noise.png")
    server, stand_in = client
    server.draw([sample("i", 4)], [[str(tmp_path / "noise.png")]], SEEDS[:1], RULES)
    [image] = stand_in.asked[0][0]["multi_modal_data"]["image"]
    assert (np.asarray(image) == pixels).all()
