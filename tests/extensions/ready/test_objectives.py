"""Losses and gradients of ready models under every objective are those of transformers' own forward, one sample at a
time, by TRL's formulas."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ready_models
import torch
import toys
from exporting import export_plan
from extension_there import needs_extension
from PIL import Image
from ready_models import FAMILIES
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForImageTextToText

from llava_ds.config.arguments import Arguments, DataArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.engine.construct import build_model
from llava_ds.export.layer_by_layer import Deadline
from llava_ds.model.families.language import has_state
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import make_twin

CPU = torch.device("cpu")
RANKS = Ranks(0, 0, 1, CPU)
STAGE_0 = {"zero_optimization": {"stage": 0}}
QUICK = "qwen3_vl"  # three axes of positions, and features for later layers
CLOSE, SINGLY_CLOSE = 1e-5, 3e-5  # relative, in float64 and in float32
IN_SINGLE = (
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "gemma4_moe",
)  # experts' kernel has no float64, in which the others are compared: rounding is 1e-5 of some
# Questions and their images; two answers to each.
ASKED = [
    ("What is it, number 0?", ["0.png"]),
    ("What?", []),
    ("Which of these two is it then?", ["1.png", "2.png"]),
    ("Is it a cat?", ["3.png"]),
]
ANSWERS = [("It is a red cat.", "No."), ("two", "It is a blue dog, two."), ("yes", "It is a cat."), ("It is", "no no")]


ALL = [QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES if one != QUICK)]


@pytest.fixture(scope="module", params=ALL)
def ready(request, tmp_path_factory):
    """See opened."""
    return opened(request.param, tmp_path_factory.mktemp("ready"))


@pytest.fixture(scope="module")
def teacher(ready, tmp_path_factory):
    """A wider model of the same family."""
    return opened(ready.family, tmp_path_factory.mktemp("teacher"), {"hidden_size": 64})


def dtype_of(family: str, flags: dict[str, object]) -> torch.dtype:
    """Return float64, or float32 where a kernel has no other."""
    return torch.float32 if family in IN_SINGLE or flags.get("bits", 16) < 16 else torch.float64


def opened(family: str, folder: Path, text: dict[str, int] | None = None, **flags: object) -> SimpleNamespace:
    """Open a family's model as training builds it, transformers' class with the same weights, and pairs of answers.

    text: settings of the language model; flags: of the model.
    """
    given = ready_models.write_ready(folder / "base", family, **(text or {}))
    flags |= {**given, "version": "processor"}
    args = toys.model_arguments(**flags)
    plan, dtype = plan_model(args, 512), dtype_of(family, flags)
    model = build_model(plan, args, STAGE_0, dtype, 0, RANKS)
    images = toys.write_data(folder / "data", "iiii")["image_folder"]
    records = [
        {
            "prompt": "".join("<image>\n" for _ in names) + question, "chosen": chosen, "rejected": rejected,
            **({"image": names} if names else {}),
        }
        for (question, names), (chosen, rejected) in zip(ASKED, ANSWERS)
    ]  # fmt: skip
    (folder / "pairs.json").write_text(json.dumps(records))
    options = plan.tower.image_options(Arguments(args, DataArguments(), TrainingArguments(), frozenset()))
    encoding, cache = toys.encoding_options(template="processor", supervise_last_turn_only=True), str(folder / "cache")
    sources = SourceOptions(image_folder=images, cache_dir=cache, are_preferences=True)
    data = open_encoded(
        open_sources(str(folder / "pairs.json"), sources), plan.tokenizer, encoding, options,
        PreflightOptions(cache_dir=cache),
    )  # fmt: skip
    data.shares_prompts = not has_state(plan.text_config)
    return SimpleNamespace(
        family=family, flags=flags, plan=plan, args=args, model=model, options=options, shares=data.shares_prompts,
        theirs=AutoModelForImageTextToText.from_pretrained(folder / "base", dtype=dtype),
        data=data, pairs=[data[i] for i in range(len(data))], images=Path(images),
        processor=ready_models.open_processor(folder / "base", family),
    )  # fmt: skip


def chat(ready, number: int) -> list[dict]:
    question, names = ASKED[number]
    parts = [{"type": "image", "image": Image.open(ready.images / name)} for name in names]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def read(ready, messages: list[dict], **options: object) -> dict[str, torch.Tensor]:
    """The processor's inputs."""
    options |= ready_models.VARIABLES.get(ready.family, {})
    return dict(
        ready.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **options)
    )


def answered(ready, number: int, text: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The processor's inputs for a question with an answer, and its mask (T,) of the answer."""
    messages = [*chat(ready, number), {"role": "assistant", "content": [{"type": "text", "text": text}]}]
    marked = ready_models.MARKED[ready.family]
    inputs = read(ready, messages, chat_template=marked, return_assistant_tokens_mask=True)
    learned = torch.as_tensor(inputs.pop("assistant_masks"))[0].bool()
    if ready.family in ("smolvlm", "idefics3"):  # the space after "Assistant:" is the answer's
        space = ready.processor.tokenizer.convert_tokens_to_ids("Ġ")
        learned |= torch.cat([learned[1:], torch.tensor([False])]) & (inputs["input_ids"][0] == space)
    return inputs, learned


def drawn_inputs(ready, number: int, ids: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The processor's inputs for a question, with the ids of a sampled answer appended, and a mask (T,) of these."""
    inputs = read(ready, chat(ready, number), add_generation_prompt=True)
    length = inputs["input_ids"].shape[1]
    ends = {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            ends[name] = torch.zeros(len(ids), dtype=torch.int64)
    for name, end in ends.items():
        inputs[name] = torch.cat([torch.as_tensor(inputs[name]), end[None]], 1)
    return inputs, torch.arange(length + len(ids)) >= length


def log_probs(theirs, inputs: dict[str, torch.Tensor], learned: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the learned tokens by transformers' outer forward."""
    logits = theirs(**inputs, use_cache=False).logits[0, :-1].double()
    ids = inputs["input_ids"][0, 1:]
    return logits.log_softmax(-1).gather(1, ids[:, None])[learned[1:], 0]


def last_hidden(theirs, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The hidden states (T, D) before the output layer."""
    return theirs.model(**inputs, use_cache=False).last_hidden_state[0]


def norm_of(*models: torch.nn.Module) -> float:
    """The norm of all gradients, which are then removed."""
    squares = [p.grad.double().square().sum() for model in models for p in model.parameters() if p.grad is not None]
    for model in models:
        model.zero_grad()
    return torch.stack(squares).sum().sqrt().item()


def compare(loss: torch.Tensor, expected: torch.Tensor, ours: list, theirs: list, terms: float = 0.0) -> None:
    """Losses and norms of gradients are equal; both are run backward. terms: size of the loss's terms, if they cancel
    each other."""
    loss.backward()
    expected.backward()
    close = CLOSE if next(ours[0].parameters()).dtype == torch.float64 else SINGLY_CLOSE
    found, wanted = norm_of(*ours), norm_of(*theirs)
    assert loss.item() == pytest.approx(expected.item(), rel=CLOSE, abs=CLOSE * terms)
    assert wanted > 1e-3 and found == pytest.approx(wanted, rel=close)


def batch_of_pairs(ready):
    batch = collate([sample for pair in ready.pairs for sample in pair.samples], ready.options)
    assert (batch.shared is not None) == ready.shares
    return batch


@needs_extension("preference")
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "simpo", "cpo", "orpo"])
def test_preferences(ready, loss_type):
    from llava_ds.extensions.preference.dpo import DPO, PairLoss

    beta, alpha, gamma = 0.3, 0.5, 0.4
    loss = PairLoss(loss_type, beta=beta, rpo_alpha=alpha, simpo_gamma=gamma, cpo_alpha=alpha)
    rows = [[log_probs(ready.theirs, *answered(ready, i, text)) for text in both] for i, both in enumerate(ANSWERS)]
    sums, lengths = (
        torch.stack([torch.stack([r.sum() for r in both]) for both in rows]),
        torch.tensor([[float(len(r)) for r in both] for both in rows]),
    )
    reference = sums.detach() + torch.randn(sums.shape, generator=torch.Generator().manual_seed(1))
    batch = batch_of_pairs(ready).with_extra(reference=reference.flatten())
    found = DPO(loss, 1, 1).forward(ready.model, batch)

    chosen, rejected = (sums - reference).unbind(1)
    if loss_type == "sigmoid":
        each = -logsigmoid(beta * (chosen - rejected))
    elif loss_type == "ipo":
        each = (chosen / lengths[:, 0] - rejected / lengths[:, 1] - 1 / (2 * beta)) ** 2
    elif loss_type == "cpo":
        each = -logsigmoid(beta * (sums[:, 0] - sums[:, 1]))
    elif loss_type == "orpo":
        odds, alpha = torch.logit((sums / lengths).exp()), 1.0
        each = -beta * logsigmoid(odds[:, 0] - odds[:, 1])
    else:
        each = -logsigmoid(beta * (sums[:, 0] / lengths[:, 0] - sums[:, 1] / lengths[:, 1]) - gamma)
    expected = (each - alpha * sums[:, 0] / lengths[:, 0]).sum()
    compare(found.loss_sum, expected, [ready.model], [ready.theirs])


@needs_extension("distill")
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_distillation(ready, teacher, beta):
    from llava_ds.extensions.distill.extension import GKD
    from llava_ds.extensions.distill.flags import Flags
    from llava_ds.extensions.distill.teacher import Divergence, run_teacher
    from llava_ds.train.objectives.objective import SFT

    flags = Flags(beta=beta, temperature=0.8, sft_alpha=0.3)
    head = Divergence(flags.temperature, ready.plan.text_config.vocab_size, beta=beta)
    part = SimpleNamespace(flags=flags, teacher=lambda batch: run_teacher(teacher.model, head, batch))
    batch = collate([pair.chosen for pair in ready.pairs], ready.options)
    found = GKD(SFT(grad_ranks=1), part).forward(ready.model, batch)

    expected = torch.zeros((), dtype=torch.float64)
    for i, (text, _) in enumerate(ANSWERS):
        inputs, learned = answered(ready, i, text)
        student, given = (
            each(**inputs, use_cache=False).logits[0, :-1][learned[1:]].double()
            for each in (ready.theirs, teacher.theirs.requires_grad_(False))
        )
        plain = cross_entropy(student, inputs["input_ids"][0, 1:][learned[1:]], reduction="sum")
        q, p = ((each / flags.temperature).softmax(-1) for each in (student, given))
        mixed = {0.0: q, 1.0: p}.get(beta, beta * p + (1 - beta) * q)
        forward, reverse = ((one * (one / mixed).log()).sum() for one in (p, q))
        weights = {0.0: (1.0, 0.0), 1.0: (0.0, 1.0)}.get(beta, (beta, 1 - beta))
        expected = expected + weights[0] * forward + weights[1] * reverse + flags.sft_alpha * plain
    compare(found.loss_sum, expected, [ready.model], [ready.theirs])


@needs_extension("preference")
def test_labelled_answers(ready):
    """KTO on both answers to every question, and the answers to other questions for its KL estimate."""
    from llava_ds.extensions.preference.kto import KTO, AnswerLoss, Mismatched, label_answers
    from llava_ds.model.heads import LogProbs, sum_by_sample

    label_answers(ready.data)
    mismatched = Mismatched.of(ready.data, 512)
    ready.data.of_answers = {}
    samples = [sample for i in range(len(mismatched)) for sample in mismatched[i].samples]
    batch = collate(samples, ready.options)
    with torch.no_grad():
        found, _ = sum_by_sample(ready.model(batch, LogProbs()), batch)
        far = []
        for i in range(len(ANSWERS)):
            for other in ready.pairs[i - 1].samples:
                ids = other.input_ids[other.labels != IGNORE_INDEX].tolist()
                far.append(log_probs(ready.theirs, *drawn_inputs(ready, i, tuple(ids))).sum())
    assert found.tolist() == pytest.approx(torch.stack(far).tolist(), rel=CLOSE)

    loss, kl = AnswerLoss(0.3, 1.3, 0.6), 0.7
    rows = [log_probs(ready.theirs, *answered(ready, i, text)) for i, both in enumerate(ANSWERS) for text in both]
    sums = torch.stack([row.sum() for row in rows])
    reference = sums.detach() + torch.randn(sums.shape, generator=torch.Generator().manual_seed(1))
    given = {name: batch.extra[name] for name in ("label", "weight", "share")}
    plain = batch_of_pairs(ready).with_extra(reference=reference, kl=torch.tensor(kl), **given)
    found = KTO(loss, 1, 1).forward(ready.model, plain)
    ratios = (sums - reference).view(-1, 2)
    good, bad = 1 - torch.sigmoid(0.3 * (ratios[:, 0] - kl)), 1 - torch.sigmoid(0.3 * (kl - ratios[:, 1]))
    compare(found.loss_sum, ((1.3 * good + 0.6 * bad) / 2).sum(), [ready.model], [ready.theirs])


def with_head(ready, seed: int) -> tuple[torch.nn.Module, torch.nn.Parameter]:
    """A copy of the model with a random value head, and the head's weights for the textbook."""
    from llava_ds.model.open.value_head import ValueHead

    model = copy.deepcopy(ready.model)
    model.value_head = ValueHead(ready.plan.text_config.hidden_size)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(seed))
    return model, torch.nn.Parameter(model.value_head.weight.detach().clone())


class Scoring(torch.nn.Module):
    """transformers' class with a value head."""

    def __init__(self, theirs, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.theirs, self.weight = theirs, weight

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return last_hidden(self.theirs, inputs).double() @ self.weight[0].double()


def last_states(ready, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The hidden states (D,) of all questions' last tokens before the answer."""
    inputs = [answered(ready, i, text) for i, (text, _) in enumerate(ANSWERS)]
    return [last_hidden(ready.theirs, each)[learned.nonzero()[0, 0] - 1].to(dtype) for each, learned in inputs]


@needs_extension("classify")
@needs_extension("embed")
def test_classes_and_embeddings(ready):
    from llava_ds.data.unlearned_answer import code_of
    from llava_ds.extensions.classify.classify import Classification, ScoreHead
    from llava_ds.extensions.embed.embed import Embedding

    model, samples = copy.deepcopy(ready.model), [pair.chosen for pair in ready.pairs]
    names, labels = ("a", "b", "c"), ["c", "a", "a", "b"]
    model.own_classify = ScoreHead(ready.plan.text_config.hidden_size, len(names))
    weight = torch.nn.Parameter(model.own_classify.weight.detach().clone())
    batch = collate(samples, ready.options).with_extra(
        **{"classify.class": [torch.tensor([code_of(x)]) for x in labels]}
    )
    found = Classification(1, 1, names=names).forward(model, batch)
    logits = torch.stack([weight.double() @ state for state in last_states(ready)])
    truth = torch.tensor([names.index(x) for x in labels])
    scoring = torch.nn.ModuleList([ready.theirs])
    scoring.register_parameter("weight", weight)
    compare(found.loss_sum, cross_entropy(logits, truth, reduction="sum"), [model], [scoring])

    parts = [[2, 1, 1], [0, 2, 1], [2, 3, 3], [0, 4, 3]]
    batch = collate(samples, ready.options).with_extra(**{"embed.part": [torch.tensor(x) for x in parts]})
    found = Embedding(1, 1, temperature=0.3).forward(model, batch)
    states = [state / state.norm() for state in last_states(ready)]
    logits = torch.stack([torch.stack([states[i] @ states[j] / 0.3 for j in (1, 3)]) for i in (0, 2)])
    compare(found.loss_sum, cross_entropy(logits, torch.tensor([0, 1]), reduction="sum"), [model], [ready.theirs])


@needs_extension("preference")
def test_reward_models(ready):
    from llava_ds.extensions.preference.reward import Reward, RewardLoss

    model, weight = with_head(ready, 2)
    scoring = Scoring(ready.theirs, weight)
    found = Reward(RewardLoss(center_rewards_coefficient=0.1), 1, 1).forward(model, batch_of_pairs(ready))
    expected = torch.zeros((), dtype=torch.float64)
    for i, both in enumerate(ANSWERS):
        inputs = [answered(ready, i, text) for text in both]
        chosen, rejected = (scoring(each)[learned.nonzero()[-1, 0]] for each, learned in inputs)
        expected = expected - logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected) ** 2
    compare(found.loss_sum, expected, [model], [scoring])


@pytest.fixture(scope="module")
def drawn(ready):
    """Answers drawn to every question, with random rewards, and their batch."""
    rl = pytest.importorskip("llava_ds.extensions.rl.policy_batches")
    prompts = []
    for pair in ready.pairs:
        sample = pair.chosen
        ids = sample.input_ids[: int((sample.labels != IGNORE_INDEX).nonzero()[0, 0])]
        prompts.append(LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), sample.media))
    rules = DrawRules(4, 6, 512, tuple(range(0, len(ready.plan.tokenizer), 6)), ready.options, temperature=0.7)
    numbers = [numbers_for(rules, 0, 1, i) for i in range(len(prompts))]
    answers = draw_answers(make_twin(ready.model), prompts, numbers, rules)
    rng, groups = np.random.default_rng(3), []
    for i, each in enumerate(answers):
        reward = {one: float(rng.integers(5)) for one in each}
        rewards = np.array([reward[one] for one in each])
        groups.append(rl.Group(rl.RolloutPrompt(i, str(i), prompts[i], "?", "!"), each, rewards[None], rewards))
    return SimpleNamespace(groups=groups, temperature=rules.temperature)


def of_answers(ready, drawn) -> list[tuple[int, tuple[int, ...], float]]:
    """The question, the ids and the advantage of every answer, as TRL has them."""
    found = []
    for i, group in enumerate(drawn.groups):
        rewards = torch.tensor(group.rewards)
        scores = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found += [(i, answer.ids, score) for answer, score in zip(group.answers, scores.tolist())]
    return found


def policy_batch_of(ready, drawn, monkeypatch):
    from llava_ds.extensions.rl import policy_batches as rl

    monkeypatch.setattr(rl, "sum_over", lambda group, values: values)
    flags = SimpleNamespace(
        loss_type="dapo", beta=0.1, scale_rewards="group", max_completion_length=6, mask_truncated_completions=False
    )
    totals = rl.totals_of(drawn.groups, Mesh(dp=1, dp_rank=0), CPU)
    units = rl.trained_answers(drawn.groups, totals, flags)
    answers = [replace(one, shares=ready.shares and i > 0) for unit in units for i, one in enumerate(unit)]
    batch = rl.policy_batch(answers, totals, totals.tokens, flags, ready.options).batch
    assert (batch.shared is not None) == ready.shares
    return batch


def rows_at(ready, theirs, drawn, number: int, ids: tuple[int, ...]) -> torch.Tensor:
    inputs, learned = drawn_inputs(ready, number, ids)
    logits = theirs(**inputs, use_cache=False).logits[0, :-1].double() / drawn.temperature
    return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[learned[1:], 0]


@needs_extension("rl")
def test_policy_gradients(ready, drawn, monkeypatch):
    from llava_ds.extensions.rl.grpo import GRPO, PolicyLoss

    batch, beta = policy_batch_of(ready, drawn, monkeypatch), 0.1
    shift = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(4), dtype=torch.float64) / 5
    numbers = batch.extra["drawn"]
    batch = batch.with_extra(drawn=numbers._replace(frozen=numbers.sampled + shift, old=numbers.sampled - shift))
    found = GRPO(PolicyLoss(beta=beta, temperature=drawn.temperature), 1, 1).forward(ready.model, batch)

    expected, tokens = torch.zeros((), dtype=torch.float64), sum(len(ids) for _, ids, _ in of_answers(ready, drawn))
    terms = 0.0
    # The same shifts for the same answers: the batch has distinct ones, in order.
    distinct = dict.fromkeys((i, ids) for i, ids, _ in of_answers(ready, drawn))
    shifts = dict(zip(distinct, shift.split([len(ids) for _, ids in distinct]), strict=True))
    for number, ids, advantage in of_answers(ready, drawn):
        rows = rows_at(ready, ready.theirs, drawn, number, ids)
        sampled = torch.tensor(next(a.log_probs for a in drawn.groups[number].answers if a.ids == ids))
        frozen, old = sampled + shifts[number, ids], sampled - shifts[number, ids]
        ratio = (rows - old).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        distance = (frozen - rows).exp() - (frozen - rows) - 1
        each = (policy + beta * distance) / tokens
        expected, terms = expected + each.sum(), terms + each.abs().sum().item()
    compare(found.loss_sum, expected, [ready.model], [ready.theirs], terms)


@needs_extension("rl")
def test_actor_and_critic(ready, drawn, monkeypatch):
    from llava_ds.extensions.rl.ppo import PPO, ActorCriticLoss, with_advantages

    batch = policy_batch_of(ready, drawn, monkeypatch)
    critic, weight = with_head(ready, 5)
    actor, judge = copy.deepcopy(ready.model), Scoring(copy.deepcopy(ready.theirs), weight)
    actor.critic = critic
    numbers = batch.extra["drawn"]
    batch = batch.with_extra(drawn=numbers._replace(old=numbers.sampled))
    before = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    batch = with_advantages(batch, before, 0.0, 1.0, 0.95)
    found = PPO(ActorCriticLoss(vf_coef=0.5, temperature=drawn.temperature), 1, 1).forward(actor, batch)

    expected, first = torch.zeros((), dtype=torch.float64), 0
    valued, weights = batch.extra["valued"], batch.extra["drawn"].weights
    for number, ids in dict.fromkeys((i, ids) for i, ids, _ in of_answers(ready, drawn)):
        at = slice(first, first := first + len(ids))
        inputs, learned = drawn_inputs(ready, number, ids)
        values = judge(inputs)[:-1][learned[1:]]
        ratio = (rows_at(ready, ready.theirs, drawn, number, ids) - batch.extra["drawn"].old[at]).exp()
        advantages, old, returns = valued.advantages[at], valued.values[at], valued.returns[at]
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        bounded = old + (values - old).clamp(-0.2, 0.2)
        squares = torch.max((values - returns) ** 2, (bounded - returns) ** 2)
        expected = expected + ((policy + 0.25 * squares) * weights[at]).sum()
    compare(found.loss_sum, expected, [actor], [ready.theirs, judge])


@pytest.mark.full
@needs_extension("lora")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("family", ALL)
def test_adapters(family, bits, tmp_path):
    """LoRA over whole and packed weights, opened by peft over transformers' class."""
    peft = pytest.importorskip("peft")
    if bits < 16:
        pytest.importorskip("bitsandbytes")
    from llava_ds.extensions.lora.adapter_export import export_adapter
    from llava_ds.extensions.lora.quantize import exact_products

    lora = {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bits": bits}
    ready = opened(family, tmp_path, ready_models.whole_blocks(family), **lora)
    ready.model.vision_tower.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in ready.model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    export = export_plan(ready.model, ready.plan, ready.args, ready.options)
    (tmp_path / "adapter").mkdir()
    export_adapter(export, ready.model, tmp_path / "adapter", RANKS)
    export.adapter.hold(export, ready.theirs, Deadline())
    theirs = peft.PeftModel.from_pretrained(ready.theirs, tmp_path / "adapter", is_trainable=True)
    rows = [log_probs(theirs, *answered(ready, i, text)) for i, both in enumerate(ANSWERS) for text in both]
    with exact_products(ready.model):
        found = ready.model(batch_of_pairs(ready))
        compare(found, -torch.cat(rows).sum(), [ready.model], [theirs])
    continued = {**ready.flags, "lora_weight_path": str(tmp_path / "adapter")}
    for more in ({}, {"freeze_mm_mlp_adapter": True}):  # the adapter's connector, trained further or not
        args = toys.model_arguments(**continued, **more)
        again = build_model(plan_model(args, 512), args, STAGE_0, dtype_of(family, lora), 0, RANKS)
        trained = {name: p for name, p in ready.model.named_parameters() if p.requires_grad}
        assert len(trained) > 20 and all(torch.equal(p, again.get_parameter(name)) for name, p in trained.items())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if "lora_" in n}, tmp_path / "adapter" / "adapter_model.safetensors")
    args = toys.model_arguments(**continued)  # another trainer's, without a connector: the base's is kept
    again = build_model(plan_model(args, 512), args, STAGE_0, dtype_of(family, lora), 0, RANKS)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=dtype_of(family, lora))
    weights = {tuple(p.flatten()[:4].tolist()) for p in plain.parameters()}
    assert all(tuple(p.flatten()[:4].tolist()) in weights for p in again.projector.parameters())
