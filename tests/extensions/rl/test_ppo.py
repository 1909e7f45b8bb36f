"""Advantages are those of a loop over each answer, and the loss of a step is the textbook's over padded answers."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from launching import ROOT

from llava_ds.batch import Batch
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, ConfigError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.step_plan import Packing
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable, parameter_groups
from llava_ds.export.tensors import live_entries
from llava_ds.extensions.rl.critic import plan_critic
from llava_ds.extensions.rl.drawer import RolloutPrompt
from llava_ds.extensions.rl.grpo import Drawn
from llava_ds.extensions.rl.policy_batches import Group, pack, policy_batch, totals_of
from llava_ds.extensions.rl.ppo import PPO, ActorCritic, ActorCriticLoss, advantages_over, token_rewards
from llava_ds.extensions.rl.value_batches import rewarded_answers, value_batches
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import Logits
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.value_head import Values
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import Answer, DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import make_twin

CPU = torch.device("cpu")
MOST, GROUP = 5, 8
ENDS = tuple(range(0, 400, 6))  # a random model would hardly draw the one of its tokenizer
MESH = Mesh(dp=1, dp_rank=0)
PACKING = Packing(1, 1, 1, 200)


def build(plan, args, seed: int):
    ranks = Ranks(0, 0, 1, CPU)
    return build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, seed, ranks)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model with a critic of other weights, and answers that it drew."""
    folder = tmp_path_factory.mktemp("toy")
    args = ModelArguments(**toys.write_base(folder / "base"))
    plan = plan_model(args, 512)
    model = build(plan, args, 0)
    twin = make_twin(model)
    model.critic = build(dataclasses.replace(plan, has_value_head=True), args, 1)
    torch.manual_seed(0)
    torch.nn.init.normal_(next(model.critic.value_head.parameters()), std=0.3)
    spec = plan.images
    options = ImageOptions(spec.size, spec.patch_size, spec.mean, "pad")
    data = toys.encoded(
        **toys.write_data(folder / "data", "iit"), tokenizer=plan.tokenizer, cache_dir=folder / "cache", images=options
    )
    prompts = []
    for i in range(len(data)):
        sample = data[i]
        begin = int((sample.labels != IGNORE_INDEX).nonzero()[0, 0])
        ids = sample.input_ids[:begin]
        prompts.append(LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), sample.media))
    rules = DrawRules(GROUP, MOST, 512, ENDS, options)
    drawn = draw_answers(twin, prompts, [numbers_for(rules, 0, 1, i) for i in range(len(prompts))], rules)
    drawn = [[*answers, *answers[:3], answers[0]] for answers in drawn]  # some are given more than once
    return SimpleNamespace(model=model, twin=twin, prompts=prompts, drawn=drawn, options=options)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process without a group sums over itself."""
    monkeypatch.setattr("llava_ds.extensions.rl.policy_batches.sum_over", lambda group, values: values)


def groups_of(toy) -> list[Group]:
    """Random rewards of the answers, equal for equal ones."""
    rng, groups = np.random.default_rng(0), []
    for i, answers in enumerate(toy.drawn):
        reward = {answer: float(rng.integers(9)) - 1.0 for answer in answers}
        rewards = np.array([reward[answer] for answer in answers])
        groups.append(Group(RolloutPrompt(i, str(i), toy.prompts[i], "?", "!"), answers, rewards[None], rewards))
    return groups


def flags(**changed: object) -> SimpleNamespace:
    rules = {"kl_ctl": 0.1, "gamma": 0.9, "lam": 0.8, "clip_reward_value": 5.0}
    return SimpleNamespace(**{"loss_type": "dapo", "max_completion_length": MOST, **rules, **changed})


def padded(toy, groups: list[Group], made: dict[Answer, tuple[torch.Tensor, ...]], training) -> SimpleNamespace:
    """A step as TRL and DeepSpeed-Chat write it: every answer in a row of its own, (A, MOST), with a mask.

    made: log-probabilities when the answers were drawn, the reference model's, and values, of every distinct answer.
    """
    every = [(answer, reward) for group in groups for answer, reward in zip(group.answers, group.rewards)]
    old, frozen, values, mask, advantages = (np.zeros((len(every), MOST)) for _ in range(5))
    for i, (answer, reward) in enumerate(every):
        size = len(answer.ids)
        old[i, :size], frozen[i, :size], values[i, :size] = (part.numpy() for part in made[answer])
        mask[i, :size] = 1
        rewards = -training.kl_ctl * (old[i] - frozen[i])
        rewards[size - 1] += min(5.0, max(-5.0, reward))
        last = 0.0
        for t in reversed(range(size)):
            after = values[i, t + 1] if t + 1 < size else 0.0
            last = rewards[t] + training.gamma * after - values[i, t] + training.gamma * training.lam * last
            advantages[i, t] = last
    taken = advantages[mask == 1]
    white = (advantages - taken.mean()) / np.sqrt(taken.var(ddof=1) + 1e-8)
    return SimpleNamespace(every=every, old=old, values=values, mask=mask, returns=advantages + values, white=white)


def made_of(groups: list[Group]) -> dict[Answer, tuple[torch.Tensor, ...]]:
    """Random numbers for every distinct answer: log-probabilities, those of the reference model, and values."""
    distinct = dict.fromkeys(answer for group in groups for answer in group.answers)
    made = {}
    for number, answer in enumerate(distinct):
        generator = torch.Generator().manual_seed(number)
        sampled = torch.tensor(answer.log_probs, dtype=torch.float64)
        noise = torch.randn(3, len(sampled), generator=generator, dtype=torch.float64)
        made[answer] = (sampled + 0.2 * noise[0], sampled + 0.2 * noise[1], noise[2])
    return made


def parts_of(batch, made: dict[Answer, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """What was made for the answers of a batch, which are recognised by what was noted when they were drawn."""
    by_rows = {answer.log_probs: values for answer, values in made.items()}
    keys = [
        tuple(part.tolist())
        for part in batch.extra["drawn"].sampled.split(torch.bincount(batch.target_samples).tolist())
    ]
    return [torch.cat(parts) for parts in zip(*(by_rows[key] for key in keys))]


def with_drawn(batch: Batch, **changed: torch.Tensor) -> Batch:
    return batch.with_extra(drawn=batch.extra["drawn"]._replace(**changed))


def step_of(toy, groups: list[Group], training, fill, packing: Packing = PACKING):
    """The batches of a step, with advantages; fill: a batch to its log-probabilities, the reference's, and values."""
    totals, units = totals_of(groups, MESH, CPU), rewarded_answers(groups, training.clip_reward_value)
    batches, values = [], []
    for each in pack(units, packing, shares=True):
        batch = policy_batch(each, totals, totals.tokens, training, toy.options).batch
        old, frozen, own = fill(batch)
        batches.append(with_drawn(batch, old=old, frozen=frozen))
        values.append(own)
    return value_batches(batches, values, totals, training, MESH)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)])
def test_advantages_are_those_of_a_loop(gamma, lam):
    rng = np.random.default_rng(0)
    lengths = [3, 1, 7, 2, 2]
    samples = np.repeat(np.arange(len(lengths)), lengths)
    values, rewards = rng.normal(size=(2, sum(lengths)))
    wanted = np.zeros(sum(lengths))
    for number in range(len(lengths)):
        own = np.flatnonzero(samples == number)
        last, after = 0.0, 0.0
        for t in own[::-1]:
            last = rewards[t] + gamma * after - values[t] + gamma * lam * last
            wanted[t], after = last, values[t]
    found = advantages_over(*map(torch.from_numpy, (values, rewards, samples)), gamma, lam)
    assert np.abs(found.numpy() - wanted).max() < 1e-12


def test_rewards_of_tokens_are_the_penalty_and_the_score_at_the_end():
    samples = torch.tensor([0, 0, 1, 2, 2, 2])
    old, frozen = torch.rand(2, 6, dtype=torch.float64)
    scores = torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    drawn = Drawn(scores, weights=None, means=None, shares=None, sampled=None, old=old, frozen=frozen)
    batch = SimpleNamespace(extra={"drawn": drawn}, target_samples=samples)
    ends = torch.tensor([0, 2.0, -1.0, 0, 0, 4.0], dtype=torch.float64)
    assert torch.equal(token_rewards(batch, 0.5), -0.5 * (old - frozen) + ends)
    batch.extra["drawn"] = drawn._replace(frozen=None)
    assert torch.equal(token_rewards(batch, 0.0), ends)


@pytest.mark.parametrize("kl_ctl", [0.0, 0.3])
def test_the_step_is_the_textbooks(toy, kl_ctl):
    """Of all answers, padded, before and after an update; answers given twice are computed once here."""
    groups, training = groups_of(toy), flags(kl_ctl=kl_ctl)
    made = made_of(groups)
    wanted = padded(toy, groups, made, training)
    assert len(made) < len(wanted.every)
    batches, metrics = step_of(toy, groups, training, lambda batch: parts_of(batch, made))

    taken = wanted.mask == 1
    error, returns = (wanted.returns - wanted.values)[taken], wanted.returns[taken]
    explained = 1 - error.var(ddof=1) / returns.var(ddof=1)
    assert metrics["val/explained_variance"].item() / len(groups) == pytest.approx(explained, abs=1e-9)
    kl = sum(float((made[answer][0] - made[answer][1]).sum()) for answer, _ in wanted.every) / len(wanted.every)
    assert metrics["objective/kl"].item() / len(groups) == pytest.approx(kl, abs=1e-9)
    scores = np.mean([min(5.0, reward) for _, reward in wanted.every])
    assert metrics["objective/rlhf_reward"].item() / len(groups) == pytest.approx(scores - kl_ctl * kl, abs=1e-9)

    loss = ActorCriticLoss(0.2, 0.3, 0.5)
    moved = {answer: (old + 0.3 * value, value + 0.4 * old) for answer, (old, _, value) in made.items()}
    rows, values = np.zeros_like(wanted.old), np.zeros_like(wanted.old)
    for i, (answer, _) in enumerate(wanted.every):
        rows[i, : len(answer.ids)], values[i, : len(answer.ids)] = moved[answer]
    ratio = np.exp(rows - wanted.old)
    actor = np.maximum(-wanted.white * ratio, -wanted.white * ratio.clip(0.8, 1.2))
    clipped = wanted.values + (values - wanted.values).clip(-0.3, 0.3)
    critic = 0.5 * np.maximum((values - wanted.returns) ** 2, (clipped - wanted.returns) ** 2)
    total, clip_share, value_share = 0.0, 0.0, 0.0
    for batch in batches:
        done = PPO(loss, 1, 1).forward(lambda each, head: parts_of(each, moved), batch)
        total += done.loss_sum.item()
        clip_share += done.metrics["policy/clipfrac_avg"].item() / len(groups)
        value_share += done.metrics["val/clipfrac_avg"].item() / len(groups)
    assert total == pytest.approx((actor + 0.5 * critic)[taken].mean(), abs=1e-9)
    lost = -wanted.white * ratio.clip(0.8, 1.2) > -wanted.white * ratio
    assert clip_share == pytest.approx(lost[taken].mean(), abs=1e-9) and clip_share > 0
    beyond = (clipped - wanted.returns) ** 2 > (values - wanted.returns) ** 2
    assert value_share == pytest.approx(beyond[taken].mean(), abs=1e-9) and value_share > 0


def one_alone(toy, model, prompt: LoadedSample, answer: Answer, values: bool) -> torch.Tensor:
    """Log-probabilities of one answer alone, by its logits; or the values before its tokens."""
    ids = torch.tensor(answer.ids)
    labels = torch.cat([torch.full_like(prompt.input_ids, IGNORE_INDEX), ids])
    batch = collate([LoadedSample(torch.cat([prompt.input_ids, ids]), labels, prompt.media)], toy.options)
    if values:
        return model(batch, Values(batch.target_positions)).double()
    logits = model(batch, Logits(batch.target_positions))
    return logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("packing", [Packing(1, 1, 1, 10_000), Packing(1, 1, 1, 90)], ids=str)
def test_the_first_pass_has_every_ratio_1_and_the_plain_gradient(toy, packing):
    """That of advantages times log-probabilities, and of the critic's squared errors, every answer on its own."""
    groups, training, objective = groups_of(toy), flags(), PPO(ActorCriticLoss(vf_coef=0.5), 1, 1)

    def fill(batch):
        with torch.no_grad():
            old, values = toy.model.eval()(batch, ActorCritic())
        return old, old - 0.1, values

    batches, _ = step_of(toy, groups, training, fill, packing)
    toy.model.zero_grad()
    ratios = 0.0
    for batch in batches:
        done = objective.forward(toy.model.train(), batch)
        done.loss_sum.backward()
        ratios += done.metrics["val/ratio"].item() / len(groups)
        assert done.metrics["policy/clipfrac_avg"].item() == done.metrics["val/clipfrac_avg"].item() == 0.0
    assert ratios == pytest.approx(1.0, abs=1e-9)
    found = {name: p.grad.clone() for name, p in toy.model.named_parameters() if p.grad is not None}
    toy.model.zero_grad()
    made, numbers = {}, {}
    for group in groups:
        for answer in group.answers:
            if answer not in made:
                rows = one_alone(toy, toy.model, group.prompt.sample, answer, False)
                values = one_alone(toy, toy.model.critic, group.prompt.sample, answer, True)
                made[answer], numbers[answer] = (rows.detach(), rows.detach() - 0.1, values.detach()), (rows, values)
    step = padded(toy, groups, made, training)
    total = 0.0
    for i, (answer, _) in enumerate(step.every):
        size, (rows, values) = len(answer.ids), numbers[answer]
        advantages, returns = (torch.from_numpy(part[i, :size]) for part in (step.white, step.returns))
        total = total + (-advantages * rows).sum() + 0.5 * 0.5 * ((values - returns) ** 2).sum()
    (total / step.mask.sum()).backward()
    for part in ("language_model", "critic.language_model", "critic.value_head"):
        assert max(grad.abs().max() for name, grad in found.items() if name.startswith(part)) > 1e-3
    for name, parameter in toy.model.named_parameters():
        if parameter.grad is not None:
            assert (found[name] - parameter.grad).abs().max() < 1e-6, name


def test_an_empty_micro_batch_takes_part_with_nothing(toy):
    groups, training = groups_of(toy), flags()
    totals = totals_of(groups, MESH, CPU)
    batch = policy_batch([], totals, totals.tokens, training, toy.options).batch
    old, values = toy.model(batch, ActorCritic())
    batches, _ = value_batches(
        [with_drawn(batch, old=old.detach(), frozen=old.detach())], [values.detach()], totals, training, MESH
    )
    toy.model.zero_grad()
    done = PPO(ActorCriticLoss(), 1, 1).forward(toy.model, batches[0])
    done.loss_sum.backward()
    assert done.loss_sum.item() == 0.0
    trunk = [p for name, p in toy.model.named_parameters() if name.startswith("critic.language_model.model.layers")]
    assert all(p.grad is not None and not p.grad.any() for p in trunk)


def test_drawing_has_no_part_in_the_critic(toy):
    assert not hasattr(toy.twin, "critic")


def test_a_critic_of_another_vocabulary_is_refused(tmp_path):
    own = ModelArguments(**toys.write_base(tmp_path / "base"))
    other = toys.write_base(tmp_path / "other")["model_name_or_path"]
    toys.add_tokens(Path(other), "<more>")
    plan = plan_model(own, 512)
    args = Arguments(own, DataArguments(), TrainingArguments(), frozenset()).replaced(objective="ppo")
    images = plan.tower.image_options(args)
    assert plan_critic(args, plan, images).model.has_value_head
    with pytest.raises(ConfigError, match="--critic_model_name_or_path"):
        plan_critic(args.replaced(critic_model_name_or_path=other), plan, images)


def test_the_critic_has_groups_of_its_own_and_is_not_exported(toy):
    """Its output layer does not train: no value comes through it."""
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(learning_rate=1e-3), frozenset())
    toy.model.critic.learning_rate = 5e-4
    for model in (toy.model, toy.model.critic):
        choose_trainable(model, args)
    groups = parameter_groups(toy.model, args)
    own = {id(p) for p in toy.model.critic.parameters()}
    for group in groups:
        of_critic = group["name"].startswith("critic_")
        assert group["lr"] == (5e-4 if of_critic else 1e-3)
        assert {id(p) in own for p in group["params"]} == {of_critic}
    held = {id(p) for group in groups for p in group["params"]}
    assert held == {id(p) for p in toy.model.parameters() if p.requires_grad}
    assert not toy.model.critic.language_model.lm_head.weight.requires_grad
    names = {entry.name for entry in live_entries(toy.model, Ranks(0, 0, 1, CPU))}
    assert names == {name for name, _ in toy.model.named_parameters() if not name.startswith("critic.")}


@pytest.mark.parametrize(
    ("argv", "recipe", "names"),
    [
        ([], None, False),
        (["--objective", "ppo"], None, True),
        (["--objective=ppo"], None, True),
        ([], "objective: ppo", True),
        ([], "seed: 1", False),
    ],
)
def test_rl_takes_grpo_where_nothing_is_named(tmp_path, argv, recipe, names):
    spec = importlib.util.spec_from_file_location("rl", ROOT / "run" / "rl.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe)
        argv = [*argv, "--recipe", str(tmp_path / "recipe.yaml")]
    assert script.names_objective(argv) == names
    assert not script.names_objective(["--recipe", str(tmp_path / "missing.yaml")])
