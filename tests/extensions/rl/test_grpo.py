"""Answers are drawn from what the packs compute, and the loss of their batches is TRL's over padded answers."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.step_plan import Packing
from llava_ds.engine.construct import build_model
from llava_ds.extensions.rl.drawer import RolloutPrompt, with_answer
from llava_ds.extensions.rl.grpo import GRPO, Correction, PolicyLoss, advantages_of
from llava_ds.extensions.rl.policy_batches import (
    Group,
    has_no_signal,
    pack,
    policy_batch,
    totals_of,
    trained_answers,
)
from llava_ds.extensions.rl.rloo import with_distances
from llava_ds.geometry import ImageOptions
from llava_ds.model.heads import Logits, LogProbs
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import Answer, DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import frozen_copy, make_twin

CPU = torch.device("cpu")
MOST, GROUP = 5, 8
ENDS = tuple(range(0, 400, 6))  # a random model would hardly draw the one of its tokenizer
MESH = Mesh(dp=1, dp_rank=0)


@pytest.fixture(scope="module", params=["llama"])
def toy(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("toy")
    args = ModelArguments(**toys.write_base(folder / "base", family=request.param))
    plan = plan_model(args, 512)
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, Ranks(0, 0, 1, CPU))
    spec = plan.images
    options = ImageOptions(spec.size, spec.patch_size, spec.mean, "pad")
    data = toys.encoded(
        **toys.write_data(folder / "data", "iiti"), tokenizer=plan.tokenizer, cache_dir=folder / "cache", images=options
    )
    prompts = []
    for i in range(len(data)):
        sample = data[i]
        begin = int((sample.labels != IGNORE_INDEX).nonzero()[0, 0])
        ids = sample.input_ids[:begin]
        prompts.append(LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), sample.media))
    rules = DrawRules(GROUP, MOST, 512, ENDS, options)
    twin = make_twin(model)
    numbers = [numbers_for(rules, 0, 1, i) for i in range(len(prompts))]
    drawn = draw_answers(twin, prompts, numbers, rules)
    return SimpleNamespace(model=model, twin=twin, prompts=prompts, rules=rules, drawn=drawn, options=options)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process without a group sums over itself."""
    monkeypatch.setattr("llava_ds.extensions.rl.policy_batches.sum_over", lambda group, values: values)


def groups_of(toy, seed: int = 0) -> list[Group]:
    """Random rewards of the answers, equal for equal ones; those of the last group are all equal."""
    rng, groups = np.random.default_rng(seed), []
    for i, answers in enumerate(toy.drawn):
        reward = {answer: float(rng.integers(4)) for answer in answers}
        rewards = np.array([1.3 if i == len(toy.drawn) - 1 else reward[answer] for answer in answers])
        groups.append(Group(RolloutPrompt(i, str(i), toy.prompts[i], "?", "!"), answers, rewards[None], rewards))
    return groups


def flags(**changed: object) -> SimpleNamespace:
    values = {
        "loss_type": "dapo",
        "beta": 0.0,
        "entropy_coef": 0.0,
        "scale_rewards": "group",
        "max_completion_length": MOST,
    }
    return SimpleNamespace(**{**values, "mask_truncated_completions": False, **changed})


def batches_of(toy, training, groups: list[Group], packing: Packing, shares: bool = True):
    totals = totals_of(groups, MESH, CPU)
    units = trained_answers(groups, totals, training)
    tokens = sum(one.times * len(one.answer.ids) for unit in units for one in unit)
    return [policy_batch(each, totals, tokens, training, toy.options) for each in pack(units, packing, shares)]


def rows_alone(toy, prompt: LoadedSample, answer: Answer) -> torch.Tensor:
    """Log-probabilities of one answer alone, by its logits."""
    ids = torch.tensor(answer.ids)
    row = torch.cat([prompt.input_ids, ids])
    sample = LoadedSample(row, torch.cat([torch.full_like(prompt.input_ids, IGNORE_INDEX), ids]), prompt.media)
    batch = collate([sample], toy.options)
    logits = toy.model(batch, Logits(batch.target_positions))
    return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


def test_answers_have_the_log_probabilities_of_the_packs(toy):
    lengths = {len(answer.ids) for answers in toy.drawn for answer in answers}
    assert len(lengths) > 1, "some answers have to end early for this test to say anything"
    for prompt, answers in zip(toy.prompts, toy.drawn):
        for answer in answers:
            with torch.no_grad():
                rows = rows_alone(toy, prompt, answer)
            assert np.abs(rows.numpy() - np.array(answer.log_probs)).max() < 1e-4
            assert answer.ended == (answer.ids[-1] in ENDS) and (answer.ended or len(answer.ids) == MOST)


def test_answers_follow_from_their_own_seeds(toy):
    """Not from what is drawn beside them."""
    alone = draw_answers(toy.twin, toy.prompts[1:2], [numbers_for(toy.rules, 0, 1, 1)], toy.rules)
    assert [one.ids for one in alone[0]] == [one.ids for one in toy.drawn[1]]
    other = draw_answers(toy.twin, toy.prompts[1:2], [numbers_for(toy.rules, 0, 2, 1)], toy.rules)
    assert [one.ids for one in other[0]] != [one.ids for one in toy.drawn[1]]


def test_answers_are_drawn_as_often_as_they_are_likely(toy):
    """The first token of many answers, against its distribution."""
    rules = dataclasses.replace(toy.rules, num_answers=4000, max_new_tokens=1)
    [answers] = draw_answers(toy.twin, toy.prompts[:1], [numbers_for(rules, 0, 1, 0)], rules)
    first = np.array([answer.ids[0] for answer in answers])
    for token in np.unique(first)[:20]:
        share = np.exp(next(answer.log_probs[0] for answer in answers if answer.ids[0] == token))
        assert abs((first == token).mean() - share) < 5 * (share * (1 - share) / 4000) ** 0.5
    entropy = -np.mean([answer.log_probs[0] for answer in answers])
    assert abs(entropy - answers[0].entropy) < 0.1


@pytest.mark.parametrize("toy", ["llama", "gemma2"], indirect=True)  # the second caps its logits
@pytest.mark.parametrize("top", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.4}], ids=str)
def test_other_temperatures_and_fewer_tokens(toy, top):
    """Log-probabilities are those of all tokens at the temperature, as training computes them; answers are drawn among
    the likely ones."""
    rules = dataclasses.replace(toy.rules, num_answers=2000, max_new_tokens=1, temperature=0.6, **top)
    [answers] = draw_answers(toy.twin, toy.prompts[:1], [numbers_for(rules, 0, 1, 0)], rules)
    first = torch.tensor([answer.ids[0] for answer in answers])
    batch = collate([with_answer(toy.prompts[0], (first[0].item(),))], toy.options)
    with torch.no_grad():
        [trained] = toy.model(batch, LogProbs(0.6)).tolist()
        [logits] = toy.model(batch, Logits(batch.target_positions))
    probs, order = (logits.double() / 0.6).softmax(-1).sort(descending=True)
    probs = torch.where(torch.arange(len(probs)) < (rules.top_k or len(probs)), probs, 0.0)
    probs = probs / probs.sum()
    probs = torch.where(probs.cumsum(0) - probs < rules.top_p, probs, 0.0)
    probs = probs / probs.sum()
    assert 1 < (probs > 0).sum() < len(probs) and set(first.tolist()) <= set(order[probs > 0].tolist())
    for token, share in zip(order.tolist(), probs.tolist()):
        assert abs((first == token).double().mean() - share) <= 5 * (share * (1 - share) / 2000) ** 0.5
    assert trained == pytest.approx(answers[0].log_probs[0], abs=1e-5)
    assert trained == pytest.approx((logits / 0.6).log_softmax(-1)[first[0]].item(), abs=1e-5)


@pytest.mark.parametrize("packing", [Packing(1, 1, 1, 10_000), Packing(1, 2, 1, None), Packing(1, 1, 1, 90)], ids=str)
def test_the_first_gradient_is_that_of_advantages_times_log_probabilities(toy, packing):
    """Every answer counted on its own, without merging or dropping any."""
    groups, objective = groups_of(toy), GRPO(PolicyLoss(), 1, 1)
    toy.model.zero_grad()
    for micro in batches_of(toy, flags(), groups, packing):
        objective.forward(toy.model, micro.batch).loss_sum.backward()
    found = [None if p.grad is None else p.grad.clone() for p in toy.model.parameters()]
    toy.model.zero_grad()
    tokens = sum(len(answer.ids) for group in groups for answer in group.answers)
    for group in groups:
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for answer, advantage in zip(group.answers, advantages):
            (-advantage * rows_alone(toy, group.prompt.sample, answer).sum() / tokens).backward()
    largest = max(p.grad.abs().max() for p in toy.model.parameters() if p.grad is not None)
    assert largest > 0.01
    for gradient, parameter in zip(found, toy.model.parameters()):
        if parameter.grad is not None:
            assert (gradient - parameter.grad).abs().max() < 1e-6


def trl_loss(rows, old, frozen, advantages, mask, training, loss: PolicyLoss) -> torch.Tensor:
    """TRL's GRPOTrainer._compute_loss, over rows (A, L) with a mask."""
    log_ratio = rows - old
    if loss.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    one = torch.exp(log_ratio)
    two = torch.clamp(one, 1 - loss.epsilon, 1 + loss.epsilon_high)
    each = -torch.min(one * advantages.unsqueeze(1), two * advantages.unsqueeze(1))
    if loss.beta:
        each = each + loss.beta * (torch.exp(frozen - rows) - (frozen - rows) - 1)
    each = each * mask
    if training.loss_type == "grpo":
        return (each.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if training.loss_type == "luspo":
        return each.sum(-1).mean()
    if training.loss_type == "dr_grpo":
        return each.sum() / (each.size(0) * training.max_completion_length)
    return each.sum() / mask.sum()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_loss_after_an_update_is_trls(toy, loss_type, level, beta, scale):
    groups, loss = groups_of(toy), PolicyLoss(0.2, 0.28, level, beta)
    training = flags(loss_type=loss_type, beta=beta, scale_rewards=scale)
    every = [answer for group in groups for answer in group.answers]
    longest = max(len(answer.ids) for answer in every)
    rows, old, frozen = (torch.zeros(len(every), longest, dtype=torch.float64) for _ in range(3))
    mask, noise = torch.zeros_like(rows), {answer: i for i, answer in enumerate(dict.fromkeys(every))}
    made: dict[Answer, tuple[torch.Tensor, ...]] = {}
    for answer, number in noise.items():
        drawn = torch.Generator().manual_seed(number)
        sampled = torch.tensor(answer.log_probs, dtype=torch.float64)
        parts = (sampled + 0.4 * torch.randn(len(sampled), generator=drawn) for _ in range(2))
        made[answer] = (sampled, *parts)
    for i, answer in enumerate(every):
        size = len(answer.ids)
        old[i, :size], rows[i, :size], frozen[i, :size] = made[answer]
        mask[i, :size] = 1
    rewards = torch.tensor(np.stack([group.rewards for group in groups]))
    centred = rewards - rewards.mean(1, keepdim=True)
    divisor = {"group": rewards.std(1, keepdim=True), "batch": rewards.std(), "none": 1 - 1e-4}[scale]
    wanted = trl_loss(rows, old, frozen, (centred / (divisor + 1e-4)).flatten(), mask, training, loss)

    total, clipped = 0.0, 0.0
    for micro in batches_of(toy, training, groups, Packing(1, 1, 1, 200)):
        batch = with_log_probs(micro.batch, made)
        done = GRPO(loss, 1, 1).forward(lambda _, head, rows=batch.rows: rows, batch.batch)
        total += done.loss_sum.item()
        clipped += done.metrics["clip_ratio/region_mean"].item()
        assert done.by_source[0].sum().item() == pytest.approx(done.loss_sum.item(), abs=1e-12)
    assert total == pytest.approx(wanted.item(), abs=1e-9)
    assert clipped > 0


@pytest.mark.parametrize("mode", [None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "rloo"])
def test_other_losses_and_the_correction_of_the_drawing_are_trls(toy, loss_type, mode):
    """Of every answer by itself, with the gradient of its log-probabilities."""
    groups, beta = groups_of(toy), 0.0 if loss_type == "rloo" else 0.3
    correction = None if mode is None else Correction(mode, clip_max=1.2, clip_min=0.8)
    high = 1.1 if loss_type == "cispo" else 0.28
    loss = PolicyLoss(0.2, high, "token", beta, loss_type=loss_type, gates=(1.0, 1.05), correction=correction)
    every, noise = [answer for group in groups for answer in group.answers], torch.Generator().manual_seed(3)
    numbers = {
        answer: [torch.tensor(answer.log_probs).double() + 0.2 * torch.randn(4, len(answer.ids), generator=noise)][0]
        for answer in dict.fromkeys(every)
    }  # rows, old, frozen and sampled of each
    rewards = np.stack([group.rewards for group in groups])
    others = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    scaled = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    scores = (rewards - others if loss_type == "rloo" else scaled).flatten().tolist()
    leaves, losses, outside, lengths = {}, [], [], [len(answer.ids) for answer in every]
    for answer, score in zip(every, scores):
        rows = leaves.setdefault(answer, numbers[answer][0].clone().requires_grad_())
        _, old, frozen, sampled = numbers[answer]
        ratio = (rows - old).sum().exp().expand(len(rows)) if loss_type == "rloo" else (rows - old).exp()
        if loss_type == "cispo":
            each = -ratio.clamp(max=high).detach() * score * rows
        elif loss_type == "sapo":
            gate = 1.0 if score > 0 else 1.05
            each = -score * torch.sigmoid(gate * (ratio - 1)) * 4 / gate
        else:
            each = -torch.min(ratio * score, ratio.clamp(0.8, 1 + high) * score)
        if mode is not None:
            gap = (old - sampled).sum() if mode.startswith("sequence") else old - sampled
            weight = gap.exp().clamp(0.8, 1.2)
            outside.append((weight != gap.exp()).expand(len(rows)) if score or beta else torch.zeros(0))
            each = each * (weight if mode.endswith("truncate") else torch.where(weight == gap.exp(), weight, 0.0))
        losses.append(each + beta * ((frozen - rows).exp() - (frozen - rows) - 1))
    if loss_type in ("dapo", "cispo"):
        wanted = torch.cat(losses).sum() / sum(lengths)
    else:
        wanted = torch.stack([each.mean() for each in losses]).mean()
    wanted.backward()

    by_drawn, total, cut, gradients = {answer.log_probs: answer for answer in leaves}, 0.0, 0.0, {}
    for micro in batches_of(toy, flags(loss_type=loss_type, beta=beta), groups, Packing(1, 1, 1, 200)):
        batch = micro.batch
        sizes = torch.bincount(batch.target_samples).tolist()
        answers = [by_drawn[tuple(part.tolist())] for part in batch.extra["drawn"].sampled.split(sizes)]
        rows, old, frozen, sampled = torch.cat([numbers[answer] for answer in answers], 1)
        rows.requires_grad_()
        batch = with_drawn(batch, old=old, frozen=frozen, sampled=sampled)
        done = GRPO(loss, 1, 1).forward(lambda _, head, rows=rows: rows, batch)
        done.loss_sum.backward()
        total += done.loss_sum.item()
        cut += done.metrics.get("importance_sampling_clipped", 0.0)
        for answer, part in zip(answers, rows.grad.split(sizes)):
            gradients[answer] = gradients.get(answer, 0) + part
    assert total == pytest.approx(wanted.item(), abs=1e-9)
    if mode is not None:
        assert 0 < cut / len(groups) == pytest.approx(torch.cat(outside).double().mean().item(), abs=1e-9)
    has_signal = {answer for group in groups if not has_no_signal(group) for answer in group.answers}
    for answer in has_signal if beta == 0 else leaves:
        torch.testing.assert_close(gradients[answer], leaves[answer].grad, rtol=1e-9, atol=1e-12)


def with_drawn(batch: Batch, **changed: torch.Tensor) -> Batch:
    return batch.with_extra(drawn=batch.extra["drawn"]._replace(**changed))


def with_log_probs(batch, made: dict[Answer, tuple[torch.Tensor, ...]]) -> SimpleNamespace:
    """The batch with made log-probabilities: of the answers, recognised by what was noted when they were drawn."""
    sizes = torch.bincount(batch.target_samples).tolist()
    keys = [tuple(part.tolist()) for part in batch.extra["drawn"].sampled.split(sizes)]
    by_rows = {answer.log_probs: values for answer, values in made.items()}
    old, rows, frozen = (torch.cat(parts) for parts in zip(*(by_rows[key] for key in keys)))
    return SimpleNamespace(batch=with_drawn(batch, old=old, frozen=frozen), rows=rows)


@pytest.mark.parametrize("packing", [Packing(1, 1, 1, 10_000), Packing(1, 1, 1, 90), Packing(1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_rloos_distance_is_in_the_reward(toy, packing, shares, masks):
    """As in TRL's RLOOTrainer, over every answer; those that came to no end may have no tokens."""
    training = flags(
        loss_type="rloo", beta=0.3, scale_rewards="group", num_generations=GROUP, mask_truncated_completions=masks
    )
    groups, noise = groups_of(toy), torch.Generator().manual_seed(3)
    made = {
        answer: torch.tensor(answer.log_probs).double() + 0.3 * torch.randn(3, len(answer.ids), generator=noise)
        for group in groups for answer in group.answers
    }  # fmt: skip
    wanted, kls = [], []
    for group in groups:
        counted = torch.tensor([float(one.ended or not masks) for one in group.answers]).double()
        old, rows, frozen = torch.stack([made[one].sum(1) for one in group.answers], 1) * counted
        rewards = torch.from_numpy(group.rewards) - 0.3 * (old - frozen)
        advantages = rewards - (rewards.sum() - rewards) / (GROUP - 1)
        ratio = (rows - old).exp()
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        wanted.append(each * counted)
        kls.append((old - frozen).sum())
    totals = totals_of(groups, MESH, CPU, masks)
    units = trained_answers(groups, totals, training)
    packs = pack(units, packing, shares) + [[]]  # an empty one, as on a rank with fewer
    batches = [policy_batch(each, totals, totals.tokens, training, toy.options).batch for each in packs]
    made = [with_log_probs(batch, made) if each else None for batch, each in zip(batches, packs)]
    zero = torch.zeros(0, dtype=torch.float64)
    batches = [one.batch if one else with_drawn(batch, old=zero, frozen=zero) for one, batch in zip(made, batches)]
    batches, metrics = with_distances(batches, packs, training)
    loss, total = PolicyLoss(loss_type="rloo"), 0.0
    for batch, one in zip(batches[:-1], made):
        total += GRPO(loss, 1, 1).forward(lambda _, head, rows=one.rows: rows, batch).loss_sum.item()
    assert total == pytest.approx(torch.cat(wanted).mean().item(), abs=1e-9)
    assert metrics["kl"].item() / len(groups) == pytest.approx((sum(kls) / totals.tokens).item(), abs=1e-9)


@pytest.mark.parametrize("toy", ["llama", "gemma2"], indirect=True)  # the second caps its logits
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("packing", [Packing(1, 1, 1, 10_000), Packing(1, 1, 1, 1)], ids=str)
def test_the_entropy_of_all_tokens_is_a_bonus(toy, loss_type, shares, packing):
    """The loss without it, minus the mean entropy over all answers, those of groups without signal as well."""
    groups, training = groups_of(toy), flags(loss_type=loss_type, entropy_coef=0.5)
    toy.model.zero_grad()
    total = 0.0
    for micro in batches_of(toy, training, groups, packing, shares):
        done = GRPO(PolicyLoss(loss_type=loss_type, temperature=0.7, entropy_coef=0.5), 1, 1)
        done = done.forward(toy.model, micro.batch)
        done.loss_sum.backward()
        total += done.loss_sum.item()
    found = [None if p.grad is None else p.grad.clone() for p in toy.model.parameters()]
    toy.model.zero_grad()
    tokens, wanted = sum(len(answer.ids) for group in groups for answer in group.answers), 0.0
    for micro in batches_of(toy, flags(loss_type=loss_type), groups, Packing(1, 1, 1, 10_000), False):
        loss = GRPO(PolicyLoss(loss_type=loss_type, temperature=0.7), 1, 1).forward(toy.model, micro.batch).loss_sum
        loss.backward()
        wanted += loss.item()
    for group in groups:
        for answer in group.answers:
            batch = collate([with_answer(group.prompt.sample, answer.ids)], toy.options)
            logs = (toy.model(batch, Logits(batch.target_positions)).double() / 0.7).log_softmax(-1)
            bonus = 0.5 * (logs.exp() * logs).sum() / tokens
            bonus.backward()
            wanted += bonus.item()
    assert total == pytest.approx(wanted, abs=1e-6)
    for gradient, parameter in zip(found, toy.model.parameters()):
        if parameter.grad is not None:
            assert (gradient - parameter.grad).abs().max() < 1e-6


def test_groups_without_signal_train_only_with_a_reference_and_truncated_answers_can_be_left_out(toy):
    groups = groups_of(toy)
    assert [has_no_signal(group) for group in groups][-1]
    totals = totals_of(groups, MESH, CPU)
    assert trained_answers(groups, totals, flags())[-1] == []
    held = trained_answers(groups, totals, flags(beta=0.1))
    assert sum(one.times for one in held[-1]) == GROUP and all(one.score == 0 for one in held[-1])
    ended = trained_answers(groups, totals, flags(mask_truncated_completions=True, beta=0.1))
    kept = [one for unit in ended for one in unit]
    assert kept and all(one.answer.ended for one in kept) and len(kept) < sum(map(len, held))


@pytest.mark.parametrize("shares", [True, False])
def test_packs_keep_a_prompts_answers_together_and_within_the_bound(toy, shares):
    groups = groups_of(toy)
    units = trained_answers(groups, totals_of(groups, MESH, CPU), flags(beta=1.0))
    whole = pack(units, Packing(1, 1, 1, 100_000), shares)
    assert len(whole) == 1 and len(whole[0]) == sum(map(len, units))
    longest = max(len(one.sample.input_ids) for unit in units for one in unit)
    for bound in (longest, 150, 250):
        packs = pack(units, Packing(1, 1, 1, bound), shares)
        sizes = [collate([one.sample for one in each], toy.options).input_ids.shape[1] for each in packs]
        assert sizes == [sum(one.num_tokens for one in each) for each in packs] and max(sizes) <= bound
        answers = [(id(one.prompt), id(one.answer)) for each in packs for one in each]
        assert sorted(answers) == sorted((id(one.prompt), id(one.answer)) for unit in units for one in unit)
    [micro] = [policy_batch(each, totals_of(groups, MESH, CPU), 1, flags(), toy.options) for each in whole]
    assert micro.num_tokens == micro.batch.input_ids.shape[1] == sum(
        len(unit[0].prompt.sample.input_ids) * (1 if shares else len(unit)) + sum(len(one.answer.ids) for one in unit)
        for unit in units if unit
    )  # fmt: skip
    images = sum(bool(prompt.media) for prompt in toy.prompts)
    assert micro.num_tiles == len(micro.batch.pixel_values) == images  # one pass of the tower for all answers


def test_an_empty_micro_batch_takes_part_with_nothing(toy):
    groups = groups_of(toy)
    micro = policy_batch([], totals_of(groups, MESH, CPU), 0.0, flags(), toy.options)
    toy.model.zero_grad()
    done = GRPO(PolicyLoss(), 1, 1).forward(toy.model, micro.batch)
    done.loss_sum.backward()
    assert done.loss_sum.item() == 0.0 and all(p.grad is None or not p.grad.any() for p in toy.model.parameters())


def test_advantages_of_one_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert advantages_of(rewards, "none", 9.0)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantages_of(rewards, "batch", 0.25)[0, 0].item() == pytest.approx(0.5 / 0.2501)
    assert advantages_of(rewards, "group", 9.0)[0, 0].item() == pytest.approx(0.5 / (3**-0.5 + 1e-4))


def test_the_reference_keeps_its_weights_and_the_twin_shares_the_models(toy):
    parameter, frozen = next(toy.model.language_model.parameters()), frozen_copy(toy.model)
    assert next(toy.twin.language_model.parameters()) is parameter
    own = next(frozen.language_model.parameters())
    assert own is not parameter and torch.equal(own, parameter) and not own.requires_grad
