"""Episodes train as a loop over them one by one: the model's tokens alone, all turns, later images included."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from episodes_toy import GAME, end_often
from PIL import Image

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IGNORE_INDEX, ConfigError, DataError
from llava_ds.data.collate import collate
from llava_ds.data.encode import Encoder
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.step_plan import Packing
from llava_ds.engine.construct import build_model
from llava_ds.extensions.environment.extension import Episodes
from llava_ds.extensions.environment.user_class import Observation, ObservationEncoder
from llava_ds.extensions.rl.drawer import RolloutPrompt
from llava_ds.extensions.rl.grpo import GRPO, PolicyLoss
from llava_ds.extensions.rl.policy_batches import Group, pack, policy_batch, totals_of, trained_answers
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import make_twin

CPU, MESH = torch.device("cpu"), Mesh(dp=1, dp_rank=0)
GROUP, SEED = 8, 5
RL = {"reward_funcs": None, "reward_model_name_or_path": None}
DATA = SimpleNamespace(model_max_length=512, supervise_last_turn_only=False)
TRAITS = SimpleNamespace(one_answer=True, draws=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    given = toys.write_base(folder / "base")
    end_often(folder / "base" / "llama")
    args = ModelArguments(**given, version="v1")
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, Ranks(0, 0, 1, CPU))
    spec = plan.images
    images = ImageOptions(spec.size, spec.patch_size, spec.mean, "pad")
    encoding = toys.encoding_options(supervise_last_turn_only=True)
    data = toys.encoded(
        **toys.write_data(folder / "data", "iit"), tokenizer=plan.tokenizer, cache_dir=folder / "cache", images=images,
        encoding=encoding,
    )  # fmt: skip
    prompts = []
    for i in range(len(data)):
        sample = data[i]
        ids = sample.input_ids[: int((sample.labels != IGNORE_INDEX).nonzero()[0, 0])]
        asked = type(sample)(ids, torch.full_like(ids, IGNORE_INDEX), sample.media)
        prompts.append(RolloutPrompt(i, f"s{i}", asked, "What is it?", "yes"))
    return SimpleNamespace(
        model=model.double(), twin=make_twin(model), plan=plan, args=args, images=images, data=data, prompts=prompts,
        rules=DrawRules(GROUP, 160, 512, (2,), images, at_once=3),
    )  # fmt: skip


def drawer(toy, folder, name: str = "Crops", source: str = GAME, **own) -> Episodes:
    """Episodes with a class of a file, of a plan that has no more than they read."""
    (folder / "game.py").write_text(source)
    flags = {"environment": f"{folder}/game.py:{name}", "max_turns": 3, "max_turn_length": 6, **own}
    sections = {"environment": SimpleNamespace(**flags), "rl": SimpleNamespace(**RL)}
    args = SimpleNamespace(model=toy.args, data=DATA, own=sections, traits=TRAITS)
    steps = SimpleNamespace(dataset=toy.data)
    return Episodes(SimpleNamespace(args=args, steps=steps, images=toy.images, model=toy.plan))


def draw(toy, folder, name: str = "Crops", **own):
    seeds = [(SEED, 1, i, 0) for i in range(len(toy.prompts))]
    return drawer(toy, folder, name, **own).draw(toy.twin, toy.prompts, seeds, toy.rules)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process without a group sums over itself."""
    monkeypatch.setattr("llava_ds.extensions.rl.policy_batches.sum_over", lambda group, values: values)


def rows_alone(toy, sample) -> torch.Tensor:
    """Log-probabilities of the supervised tokens of one sample, by its logits."""
    batch = collate([sample], toy.images)
    logits = toy.model(batch, Logits(batch.target_positions))
    return logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]


@pytest.mark.parametrize("name", ["Crops", "Opens"])
def test_the_drawing_has_the_log_probabilities_of_training(toy, tmp_path, name):
    """Of all turns; and the tokens in between are those of a conversation as it trains."""
    found = draw(toy, tmp_path, name)
    every = [one for _, episodes in found for one in episodes]
    turns = [sum(each["from"] == "model" for each in one.columns["turns"]) for one in every]
    assert {1, 2, 3} <= set(turns) and {one.ended for one in every} == {True, False}
    assert any(len(one.sample.media) > 1 for one in every) and any(one.digests for one in every)
    for asked, episodes in found:
        for one in episodes:
            with torch.no_grad():
                rows = rows_alone(toy, one.sample)
            assert np.abs(rows.numpy() - np.array(one.log_probs)).max() < 1e-5
            supervised = one.sample.labels != IGNORE_INDEX
            assert tuple(one.sample.input_ids[supervised].tolist()) == one.ids
            assert one.sample.input_ids[: len(asked.sample.input_ids)].equal(asked.sample.input_ids)
            assert len(one.tokens) <= toy.rules.max_new_tokens
            assert not one.ended or one.ids[-1] == 2


def test_an_environment_of_one_turn_draws_the_plain_answers(toy, tmp_path):
    seeds = [(SEED, 1, i, 0) for i in range(len(toy.prompts))]
    episodes = drawer(toy, tmp_path, "Once", max_turn_length=None)
    episodes._judges_alone = False
    found = episodes.draw(toy.twin, toy.prompts, seeds, toy.rules)
    numbers = [numbers_for(toy.rules, *seed) for seed in seeds]
    plain = [draw_answers(toy.twin, [asked.sample], [own], toy.rules)[0] for asked, own in zip(toy.prompts, numbers)]
    assert [[one.ids for one in each] for _, each in found] == [[one.ids for one in each] for each in plain]


def test_episodes_repeat(toy, tmp_path):
    """The environment is made anew, and every turn has random numbers of its own."""
    first, second = draw(toy, tmp_path), draw(toy, tmp_path)
    assert [each for _, each in first] == [each for _, each in second]
    assert len({one for _, each in first for one in each}) > GROUP


@pytest.mark.parametrize("packing", [Packing(1, 1, 1, 10_000), Packing(1, 2, 1, None), Packing(1, 1, 1, 260)], ids=str)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packs_train_as_a_loop_over_episodes(toy, tmp_path, packing, shares, level):
    """Loss and gradients, with clipping and the distance from a reference model, of environment tokens nothing."""
    loss = PolicyLoss(0.2, 0.28, level, 0.3)
    training = SimpleNamespace(
        loss_type="dapo", beta=0.3, entropy_coef=0.0, scale_rewards="group", mask_truncated_completions=False,
        max_completion_length=160,
    )  # fmt: skip
    groups = []
    for asked, episodes in draw(toy, tmp_path, "Opens"):
        rewards = np.array([one.reward for one in episodes])
        groups.append(Group(asked, episodes, rewards[None], rewards))

    def others(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of an old policy and of a reference, made up."""
        return rows + 0.4 * torch.sin(3.0 * targets), rows + 0.5 * torch.cos(2.0 * targets)

    totals = totals_of(groups, MESH, CPU)
    units = trained_answers(groups, totals, training)
    tokens = sum(one.times * len(one.answer.ids) for unit in units for one in unit)
    toy.model.zero_grad()
    found = 0.0
    for each in pack(units, packing, shares):
        batch = policy_batch(each, totals, tokens, training, toy.images).batch
        drawn = batch.extra["drawn"]
        old, frozen = others(drawn.sampled, batch.targets)
        micro = batch.with_extra(drawn=drawn._replace(old=old, frozen=frozen))
        done = GRPO(loss, 1, 1).forward(toy.model, micro)
        done.loss_sum.backward()
        found += done.loss_sum.item()
    gradients = {name: p.grad.clone() for name, p in toy.model.named_parameters() if p.grad is not None}

    toy.model.zero_grad()
    wanted = 0.0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, advantage in zip(group.answers, advantages):
            rows = rows_alone(toy, one.sample)
            old, frozen = others(torch.tensor(one.log_probs, dtype=torch.float64), torch.tensor(one.ids))
            ratio = (rows - old).exp() if level == "token" else (rows - old).mean().exp().expand(len(rows))
            each = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            each = each + 0.3 * ((frozen - rows).exp() - (frozen - rows) - 1)
            part = each.sum() / totals.tokens
            part.backward()
            wanted += part.item()
    assert found == pytest.approx(wanted, abs=1e-7)
    assert totals.tokens == sum(len(one.ids) for group in groups for one in group.answers)
    largest = 0.0
    for name, parameter in toy.model.named_parameters():
        if parameter.grad is not None:
            largest = max(largest, parameter.grad.abs().max().item())
            assert (gradients[name] - parameter.grad).abs().max() < 1e-6, name
    assert largest > 0.01
    assert any(name.startswith("projector") for name in gradients)


@pytest.mark.parametrize("write", [toys.write_base, toys.write_qwen_base], ids=["llama", "qwen"])
@pytest.mark.parametrize("version", ["v1", "llama_2", "mpt", "chatml", "chat_template"])
def test_turns_are_written_as_in_records(toy, tmp_path, write, version):
    """Between two answers stand the tokens that a conversation of that many turns has there."""
    model = ModelArguments(**write(tmp_path / "base"), version=version)
    tokenizer = plan_model(model, 512).tokenizer
    if version == "chat_template" and tokenizer.chat_template is None:
        pytest.skip("no template")
    args = SimpleNamespace(model=model, data=DATA, traits=TRAITS)
    plan = SimpleNamespace(args=args, images=toy.images, model=SimpleNamespace(tokenizer=tokenizer))
    try:
        encoder = ObservationEncoder(plan)
    except ConfigError as error:
        pytest.skip(str(error))
    texts = ["<image>\nWhat is it?", "top left", "<image>\nAnd now? no", "a red cat", "yes, two", "two"]
    talk = tuple(Message(("human", "gpt")[i % 2], text) for i, text in enumerate(texts))
    options = toys.encoding_options(template=version)
    whole = Encoder(tokenizer, options).encode_whole(Transcript(talk), (9, 9))
    first = encoder.ids(Observation(texts[0].removeprefix("<image>\n"), (Image.new("RGB", (9, 9)),)), (9,), opens=True)
    ids, place = whole.input_ids.tolist(), len(first)
    assert ids[:place] == first
    for text, image in ((texts[2], 1), (texts[4], 0)):
        shown = Observation(text.removeprefix("<image>\n"), (Image.new("RGB", (9, 9)),) * image)
        between = encoder.ids(shown, (9,) * image)
        place = next(i for i in range(place, len(ids)) if ids[i : i + len(between)] == between)
        assert ids[place - 1] in (tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
        place += len(between)
    assert tokenizer.decode(ids[place:], skip_special_tokens=True).strip().endswith(texts[-1])


BROKEN = {
    "self.missing": ("", "game.py:E has no method reset: it needs reset(record, seed) and step(answer)"),
    "raises": ("raise KeyError('x')", "record 's0', turn 1: step raised KeyError('x')"),
    "two values": (
        "return 'text', 1.0",
        "turn 1: step gave ('text', 1.0), expected an observation, a reward, and True",
    ),
    "no bool": ("return 'text', 1.0, 'done'", "expected an observation, a reward, and True or False"),
    "no observation": (
        "return None, 1.0, False",
        'step gave None, expected the observation as a text without <image>, or {"text"',
    ),
    "empty": ("return '', 1.0, False", "expected the observation as a text without <image>, or"),
    "another key": (
        "return {'txt': 'a'}, 1.0, False",
        "step gave {'txt': 'a'}, expected the observation as a text without <image>, or",
    ),
    "no number": ("return 'a', 'good', False", "step gave 'good', expected a finite number or None as the reward"),
    "not finite": ("return 'a', float('nan'), False", "step gave nan, expected a finite number or None as the reward"),
    "no image": ("return {'images': ['a.png']}, 0, False", "step gave 'a.png', expected an image of PIL with pixels"),
    "a mark": ("return 'See <image>', 0, False", "expected the observation as a text without <image>, or"),
    "too many images": (
        "return {'images': [Image.new('RGB', (9, 9))] * 40}, 0, False",
        "tokens with 40 images, but --max_completion_length is 160: give less, or raise it",
    ),
    "too large": (
        "return {'images': [Image.new('L', (4000, 4000))]}, 0, False",
        "an image can't be used: an image has 4000 x 4000 pixels, more than --max_image_pixels 1000000",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_environment_is_refused_with_record_and_turn(toy, tmp_path, kind):
    body, expected = BROKEN[kind]
    source = f"from PIL import Image\nclass E:\n def reset(self, record, seed): pass\n def step(self, answer): {body}\n"
    if not body:
        source = "class E:\n def step(self, answer): pass\n"
    toy.images = ImageOptions(**{**vars(toy.images), "max_pixels": 10**6})
    with pytest.raises((ConfigError, DataError)) as refused:
        drawer(toy, tmp_path, "E", source).try_out(toy.prompts[0], toy.rules)
    assert expected in str(refused.value) and str(refused.value).startswith("--environment ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1", "has no class E"),
        ("class E:\n def reset(self): pass\n def step(self, answer): pass", "turn 0: reset raised TypeError("),
        (
            "class E:\n def reset(self, record, seed): 0\n def step(self, answer): raise KeyError(answer)",
            "game.py:3",
        ),
        (
            "class E:\n def __init__(self, a): pass\n def reset(self): 0\n def step(self): 0",
            "the constructor raised Type",
        ),
        (
            "import random\nclass E:\n def reset(self, record, seed): return str(random.random())\n def step(self): 0",
            "reset gave several observations for one record and seed: make it depend on these only",
        ),
        (
            "class E:\n def reset(self, record, seed): return 'word ' * 600\n def step(self, answer): 0",
            "reset gave an observation of ",
        ),
        (
            "class E:\n def reset(self, record, seed): 0\n def step(self, answer): return None, None, True",
            "turn 1: no reward came, and only --environment gives any: return one, or name --reward_funcs",
        ),
    ],
)
def test_a_broken_beginning_and_end_are_refused(toy, tmp_path, source, expected):
    with pytest.raises((ConfigError, DataError)) as refused:
        drawer(toy, tmp_path, "E", source.replace("seed): 0", "seed): return None")).draw(
            toy.twin, toy.prompts[:1], [(0, 0, 0, 0)], toy.rules
        )
    assert expected in str(refused.value)
