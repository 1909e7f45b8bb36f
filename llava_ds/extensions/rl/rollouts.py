"""Build the steps of reinforcement learning: choose prompts, generate and reward answers, and make batches."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from deepspeed import DeepSpeedEngine

from llava_ds.batch import Batch
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, in_short
from llava_ds.data.collate import LoadedSample
from llava_ds.data.dataset import BrokenSample
from llava_ds.data.encoded_rows import OTHER_COLUMNS
from llava_ds.data.loader import Counts, MicroBatch, Window
from llava_ds.data.templates import TEMPLATES
from llava_ds.extensions.base import SessionPart
from llava_ds.extensions.rl.critic import add_critic
from llava_ds.extensions.rl.drawer import Drawer, Episode, RolloutPrompt, whole_sample
from llava_ds.extensions.rl.flags import Flags
from llava_ds.extensions.rl.policy_batches import (
    Group,
    TrainedAnswer,
    has_no_signal,
    metrics_of,
    pack,
    policy_batch,
    sums_of_ranks,
    totals_of,
    trained_answers,
)
from llava_ds.extensions.rl.ppo import ActorCritic
from llava_ds.extensions.rl.rewards import Completion, model_rewards, try_rewards
from llava_ds.extensions.rl.rloo import with_distances
from llava_ds.extensions.rl.value_batches import rewarded_answers, value_batches
from llava_ds.extensions.rl.vllm_client import VllmServer
from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.model.heads import LogProbs
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.ranks import gather, on_every_rank, print_first
from llava_ds.runtime.waiting import queuing, waiting
from llava_ds.second_models.frozen import Scorer
from llava_ds.train.evaluating.sampling import Answer, DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import frozen_copy, make_twin, whole_weights
from llava_ds.train.objectives.prompt_sharing import shares_prompts
from llava_ds.train.plan import Plan
from llava_ds.train.start import Start

NAMED_BY = 100  # records, spread over the data, whose keys define the columns; records that lack one have None
WATCHED_STEPS = 3  # first steps after a start; warn if in each of their groups all rewards are equal


@dataclass(frozen=True)
class PolicyWindow(Window):
    """The generated answers of a step. num_prompts: this rank's prompts, including those without trained answers."""

    num_prompts: int = 0

    @property
    def counts(self) -> Counts:
        """Counts of the trained answers, but with the number of all prompts as the number of samples."""
        return super().counts._replace(samples=self.num_prompts)


class Rollouts(SessionPart):
    """Generates the answers of each step with the current weights, and builds the step's batches."""

    def __init__(self, plan: Plan, started: Start) -> None:
        super().__init__(plan, started)
        self._flags: Flags = plan.args.own["rl"]
        self.updates = self._flags.num_iterations
        kept = {"top_k": self._flags.top_k, "top_p": self._flags.top_p}
        self._rules = DrawRules.of(plan, self._flags, num_answers=self._flags.num_generations, **kept)
        self._drawer = next((own for own in plan.own.values() if isinstance(own, Drawer)), None)
        self._groups_seen = self._groups_without_signal = 0
        critic, configs = plan.own["rl"].critic, [plan.model.text_config]
        if critic is not None:
            configs.append(critic.model.text_config)
        self._shares_prompts = shares_prompts(self._flags.share_prompts, plan.args, configs)
        if self._drawer is not None and plan.images.trunk_inputs(torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])):
            self._shares_prompts = False  # images in an answer would attend to themselves but not to the prompt
        on_every_rank(self.ranks, self._try_rewards)

    def built(self, model: LlavaModel) -> None:
        """Set up generation and the judging models, then add the critic to the actor."""
        plan, ranks, flags, own = self.plan, self.ranks, self._flags, self.plan.own["rl"]
        self._twin = make_twin(model)
        url, folder = flags.vllm_server, plan.output_dir / "vllm"
        self._server = None if url is None else VllmServer(url, folder, plan.export, ranks)
        self._has_critic = own.critic is not None
        self._rewards_distance = not self._has_critic and flags.loss_type == "rloo" and flags.beta > 0
        self._reference = frozen_copy(model) if (flags.kl_ctl if self._has_critic else flags.beta) else None
        self._rewards = own.rewards
        if own.reward_model is not None:
            judge = Scorer(own.reward_model, plan.resolved.compute_dtype, ranks)
            self._rewards = (*own.rewards[:-1], replace(own.rewards[-1], of_all=partial(model_rewards, judge)))
        if self._drawer is not None:
            self._rewards = (*self._rewards, self._drawer.reward)
        if own.critic is not None:
            add_critic(model, own.critic, plan.resolved, plan.args, ranks)

    def _try_rewards(self) -> None:
        """Call the user's code before the model is built. Raises DataError if it fails."""
        rewards, dataset = self.plan.own["rl"].rewards, self.plan.steps.dataset
        self._names = {}
        if self._drawer is not None or any(reward.of_user for reward in rewards):
            some = dataset.rows[np.linspace(0, len(dataset) - 1, min(len(dataset), NAMED_BY)).astype(int)].tolist()
            self._names = dict.fromkeys(name for number in some for name in self._columns_of(dataset.row(number)))
            for asked in self._prompts([0])[0]:
                if self._drawer is not None:
                    self._drawer.try_out(asked, self._rules)
                    asked = replace(asked, columns={**asked.columns, **{name: [] for name in self._drawer.columns}})
                try_rewards(rewards, self._completion(asked, asked.reference, 1))

    def _columns_of(self, row: dict[str, object]) -> dict[str, object]:
        """Return the other columns of a record, with None for columns that this record lacks."""
        text = row.get(OTHER_COLUMNS.name)
        return {**self._names, **(json.loads(text) if text else {})}

    def _log(self, done: int) -> RowLog | None:
        """Open the log of answers on rank 0, and drop rows of steps that the resumed run will repeat."""
        path = self.plan.run_folder / "rollouts.jsonl"
        return RowLog(path, [row for row in rows_of(path) if row["step"] <= done]) if self.ranks.is_first else None

    def windows(self, engine: DeepSpeedEngine, done: int, plain: Iterator[Window]) -> Iterator[PolicyWindow]:
        """Yield this rank's window of answers for every remaining step. Collective."""
        steps, log = self.plan.steps, self._log(done)
        for step, layout in enumerate(steps.after(done), done + 1):
            started = time.perf_counter()
            if self._server is not None:
                self._server.push(engine)
            samples = [sample for micro in layout.of_ranks[self.mesh.dp_rank] for sample in micro]
            prompts, broken = self._prompts(samples)
            groups, more = self._groups(step, prompts)
            if log is not None and groups:
                log.write([self._shown(step, groups[0])])
            if step <= done + WATCHED_STEPS:
                self._watch_signal(groups, is_last=step == done + WATCHED_STEPS)
            micro_batches, metrics = self._batches(engine, groups)
            micro_batches[0] = replace(micro_batches[0], broken=tuple(broken))
            yield PolicyWindow(
                micro_batches,
                num_planned=len(layout.samples),
                data_wait_s=time.perf_counter() - started,
                passes=self.updates,
                metrics=metrics | more,
                num_prompts=len(groups),
            )

    def _prompts(self, samples: list[int]) -> tuple[list[RolloutPrompt], list[BrokenSample]]:
        """Return the prompts of these samples, and the samples that can't be read."""
        found, broken = [], []
        for index in samples:
            item = self.plan.steps.dataset[index]
            if not isinstance(item, BrokenSample):
                item = self._to_prompt(index, item)
            (broken if isinstance(item, BrokenSample) else found).append(item)
        return found, broken

    def _to_prompt(self, index: int, sample: LoadedSample) -> RolloutPrompt | BrokenSample:
        dataset, tokenizer = self.plan.steps.dataset, self.plan.model.tokenizer
        row = dataset.row(int(dataset.rows[index]))
        answer = (sample.labels != IGNORE_INDEX).nonzero()[:, 0]
        prompt = self._rules.prompt(dataset, index, sample, int(answer[0]) if len(answer) else 0)
        if isinstance(prompt, BrokenSample):
            return prompt
        ids = prompt.input_ids
        text = tokenizer.decode(ids[ids != IMAGE_TOKEN_INDEX], skip_special_tokens=True)
        text = text.replace(TEMPLATES[self.plan.args.model.version].system, "", 1).strip()
        reference = tokenizer.decode(sample.input_ids[answer], skip_special_tokens=True).strip()
        return RolloutPrompt(index, str(row["id"]), prompt, text, reference, self._columns_of(row))

    def _groups(self, step: int, prompts: list[RolloutPrompt]) -> tuple[list[Group], dict[str, torch.Tensor]]:
        """Generate answers to each prompt, and reward them. Also returns the number of replaced prompts. Collective.

        With --dynamic_sample, a group without a signal is replaced by answers to another prompt. The choice depends
        only on --seed, the step and the prompt.
        """
        flags, places, replaced = self._flags, list(range(len(prompts))), set()
        groups = self._answered((step, 0), prompts, prompts)
        if not flags.dynamic_sample:
            return groups, {}
        for attempt in range(1, flags.max_resample_times + 1):
            places = [i for i in places if has_no_signal(groups[i])]
            if not any(gather(len(places), self.ranks)):
                break
            found = [(i, other) for i in places if (other := self._another((step, attempt), prompts[i])) is not None]
            new = self._answered((step, attempt), [prompts[i] for i, _ in found], [other for _, other in found])
            better = {i: group for (i, _), group in zip(found, new) if not has_no_signal(group)}
            replaced.update(better)
            groups = [better.get(i, group) for i, group in enumerate(groups)]
        number = torch.tensor(float(len(replaced)), dtype=torch.float64, device=self.ranks.device)
        return groups, {"frac_resampled": number}

    def _another(self, turn: tuple[int, int], prompt: RolloutPrompt) -> RolloutPrompt | None:
        """Choose a random replacement for a prompt. Returns None if its sample is broken; its own step reports that."""
        dataset = self.plan.steps.dataset
        rng = np.random.default_rng([self.plan.args.training.seed, *turn, prompt.index])
        found, _ = self._prompts([int(rng.integers(len(dataset)))])
        return found[0] if found else None

    def _answered(self, turn: tuple[int, int], slots: list[RolloutPrompt], prompts: list[RolloutPrompt]) -> list[Group]:
        """Generate and reward answers to each prompt. Collective.

        turn: step and attempt. slots: the step's original prompts that `prompts` may replace.
        """
        drawn = self._draw(turn, slots, prompts)
        return on_every_rank(self.ranks, lambda: self._score(*drawn))

    def _draw(
        self, turn: tuple[int, int], slots: list[RolloutPrompt], prompts: list[RolloutPrompt]
    ) -> tuple[list[RolloutPrompt], list[list[Answer]]]:
        """Generate answers to a few prompts at a time. Also returns the prompts as the model got them."""
        step, attempt = turn
        seeds = [(self.plan.args.training.seed, step, slot.index, attempt) for slot in slots]
        if self._server is not None:
            places = [self._images_of(prompt) for prompt in prompts]
            samples = [prompt.sample for prompt in prompts]
            return prompts, on_every_rank(self.ranks, lambda: self._server.draw(samples, places, seeds, self._rules))
        drawer = self._drawer
        with whole_weights(self._twin), self.plan.resolved.autocast(self.ranks.device):
            if drawer is not None:
                pairs = on_every_rank(self.ranks, lambda: drawer.draw(self._twin, prompts, seeds, self._rules))
                return [asked for asked, _ in pairs], [episodes for _, episodes in pairs]
            numbers = [numbers_for(self._rules, *each) for each in seeds]
            return prompts, draw_answers(self._twin, [prompt.sample for prompt in prompts], numbers, self._rules)

    def _score(self, prompts: list[RolloutPrompt], answers: list[list[Answer]]) -> list[Group]:
        """Reward the answers to each prompt."""
        completions = [self._judged(asked, one) for asked, some in zip(prompts, answers) for one in some]
        shape = (len(self._rewards), len(prompts), self._rules.num_answers)
        by_function = np.array([reward.of_all(completions) for reward in self._rewards]).reshape(shape)
        weights = np.array([reward.weight for reward in self._rewards])
        return [
            Group(asked, some, by_function[:, i], weights @ np.nan_to_num(by_function[:, i]))
            for i, (asked, some) in enumerate(zip(prompts, answers))
        ]

    def _judged(self, asked: RolloutPrompt, answer: Answer) -> Completion:
        """Return a sampled answer in the form that rewards take."""
        sample = whole_sample(asked.sample, answer)
        tokens = len(sample.input_ids) - len(asked.sample.input_ids)
        found = replace(self._completion(asked, self._text_of(answer), tokens), sample=sample)
        if isinstance(answer, Episode):
            found = replace(found, columns={**asked.columns, **answer.columns}, own=answer.reward)
        return found

    def _completion(self, asked: RolloutPrompt, text: str, tokens: int) -> Completion:
        """Return an answer's text in the form that rewards take, without its tokens."""
        lengths = {
            "tokens": tokens,
            "max_tokens": self._rules.max_new_tokens,
            "punished": self._flags.soft_punish_cache,
        }
        return Completion(asked.text, text, asked.reference, asked.id, columns=asked.columns, **lengths)

    def _watch_signal(self, groups: list[Group], is_last: bool) -> None:
        """Count groups without a signal. At the last watched step, warn if no group had one. Collective."""
        self._groups_seen += len(groups)
        self._groups_without_signal += sum(map(has_no_signal, groups))
        if not is_last:
            return
        totals = np.sum(gather([self._groups_seen, self._groups_without_signal], self.ranks), axis=0)
        if self._has_critic or not groups or totals[0] > totals[1]:
            return
        group = groups[0]
        shown = ", ".join(
            f"{reward:g} for {in_short(repr(self._text_of(answer)))}"
            for answer, reward in zip(group.answers[:2], group.rewards)
        )
        print_first(
            f"WARNING: nothing was learned in {WATCHED_STEPS} steps: the answers to each of {totals[0]} prompts had "
            f"equal rewards, like {shown} (reference {in_short(repr(group.prompt.reference))}). Check the reward, "
            "sample more answers (--num_generations), or fine-tune the model on answers first"
        )

    def _text_of(self, answer: Answer) -> str:
        """Decode an answer, or its last turn, without its special tokens."""
        if isinstance(answer, Episode):
            return answer.text
        return self.plan.model.tokenizer.decode(answer.ids, skip_special_tokens=True).strip()

    def _shown(self, step: int, group: Group) -> dict[str, object]:
        """Return a row of rollouts.jsonl: a prompt's distinct answers, sorted by reward, highest first."""
        times = Counter(zip(group.answers, group.rewards.tolist()))
        answers = [
            {
                "text": answer.shown if isinstance(answer, Episode) else self._text_of(answer),
                "reward": reward,
                "times": number,
            }
            for (answer, reward), number in sorted(times.items(), key=lambda item: -item[0][1])
        ]
        asked = group.prompt
        shown = {"id": asked.id, "prompt": asked.text, "images": self._images_of(asked), "reference": asked.reference}
        return {"step": step, **shown, "answers": answers}

    def _images_of(self, asked: RolloutPrompt) -> list[str | dict[str, object]]:
        """Return the paths of a prompt's images."""
        return self.plan.steps.dataset.images_of(asked.index)[: len(asked.sample.media)]

    def _batches(self, engine, groups: list[Group]) -> tuple[list[MicroBatch], dict[str, torch.Tensor]]:
        """Return micro-batches on the device, equally many on every rank, and the step's metrics as sums over prompts.

        If no answer is trained, micro-batches are empty.
        """
        flags, mesh = self._flags, self.mesh
        totals = totals_of(groups, mesh, engine.device, flags.mask_truncated_completions)
        if self._has_critic:
            units = rewarded_answers(groups, flags.clip_reward_value)
        else:
            units = trained_answers(groups, totals, flags)
        tokens = sum(one.times * len(one.answer.ids) for unit in units for one in unit)
        [trained_tokens] = sums_of_ranks([tokens], mesh, engine.device)
        packs: list[list[TrainedAnswer]] = pack(units, self.plan.steps.packing, self._shares_prompts)
        most = max(1, *gather(len(packs), self.ranks))
        packs += [[] for _ in range(most - len(packs))]
        made = [policy_batch(each, totals, trained_tokens, flags, self.plan.images) for each in packs]
        with waiting("the answers on their way to the device"):
            metrics = metrics_of(groups, self._rewards, totals, mesh, engine.device)
            moved = [micro.batch.to(engine.device) for micro in made]
        with queuing():
            found = [self._with_log_probs(engine, batch) for batch in moved]
        batches = [batch for batch, _ in found]
        if self._drawer is not None:
            own = self._drawer.metrics([group.answers for group in groups])
            metrics |= {
                name: torch.tensor(value, dtype=torch.float64, device=engine.device) for name, value in own.items()
            }
        if self._has_critic:
            batches, more = value_batches(batches, [values for _, values in found], totals, flags, mesh)
            metrics |= more
        elif self._rewards_distance:
            batches, more = with_distances(batches, packs, flags)
            metrics |= more
        return [replace(micro, batch=batch) for micro, batch in zip(made, batches)], metrics

    @torch.no_grad()
    def _with_log_probs(self, engine, batch: Batch) -> tuple[Batch, torch.Tensor | None]:
        """Add old and reference log-probabilities to the batch. Also returns the critic's values (S,), or None."""
        values, drawn = None, batch.extra["drawn"]
        if self._has_critic or self._rewards_distance or self.updates > 1:
            engine.eval()
            head = ActorCritic if self._has_critic else LogProbs
            found = engine(batch, head(self._rules.temperature))
            engine.train()
            old, values = found if self._has_critic else (found, None)
            drawn = drawn._replace(old=old)
        if self._reference is not None:
            with self.plan.resolved.autocast(self.ranks.device):
                frozen = self._reference(batch, LogProbs(self._rules.temperature))
            drawn = drawn._replace(frozen=frozen)
        return batch.with_extra(drawn=drawn), values
