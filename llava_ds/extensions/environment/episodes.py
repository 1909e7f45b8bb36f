# G episodes of a prompt
"""Draw episodes: turns of the model, with an environment's texts and images between them."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, DataError, in_short
from llava_ds.data.collate import LoadedSample
from llava_ds.data.encoded_rows import media_from_text
from llava_ds.data.images.decode import load_images
from llava_ds.extensions.environment.observed import ObservationEncoder, tiles_of
from llava_ds.extensions.environment.user_class import FLAG, Game, Observation, class_of_file
from llava_ds.extensions.rl.drawer import Drawer, Episode, RolloutPrompt
from llava_ds.extensions.rl.rewards import Reward
from llava_ds.layouts import MediaLayout
from llava_ds.model.llava import LlavaModel
from llava_ds.train.evaluating.sampling import Answer, DrawRules, draw_answers, numbers_for
from llava_ds.train.plan import Plan


@dataclass(frozen=True)
class Continued(LoadedSample):
    """A prompt with the turns so far. used: tokens after the prompt."""

    used: int = 0


@dataclass(frozen=True)
class TurnRules(DrawRules):
    """Rules of drawing a turn. max_new_tokens: of a whole episode, observations included; turn: most of one turn."""

    turn: int | None = None

    def left(self, prompt: Continued) -> int:
        """Return how many tokens may follow in the episode."""
        return min(self.max_new_tokens - prompt.used, self.max_length - len(prompt.input_ids))

    def room(self, prompt: Continued) -> int:
        """Return how many tokens the next turn may have."""
        return self.left(prompt) if self.turn is None else min(self.left(prompt), self.turn)


@dataclass(eq=False)
class Play:
    """An episode in progress. tokens: all after the prompt; is_own: True at the model's; media: images after the
    prompt's; reward: nan while there is none; ended: the environment ended it; is_over: it or a bound did."""

    asked: RolloutPrompt
    game: Game
    tokens: list[int] = field(default_factory=list)
    is_own: list[bool] = field(default_factory=list)
    media: list[tuple[torch.Tensor, MediaLayout]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)
    reward: float = math.nan
    ended: bool = False
    is_over: bool = False

    def sample(self) -> Continued:
        """Return the prompt with all turns so far, supervised at the model's tokens."""
        prompt, ids = self.asked.sample, torch.tensor(self.tokens, dtype=torch.int64)
        labels = torch.where(torch.tensor(self.is_own, dtype=torch.bool), ids, IGNORE_INDEX)
        both = torch.cat([prompt.input_ids, ids]), torch.cat([torch.full_like(prompt.input_ids, IGNORE_INDEX), labels])
        return Continued(*both, [*prompt.media, *self.media], prompt.source, used=len(ids))

    def add(self, tokens: Sequence[int], speaker: str, text: str) -> None:
        """Add a turn."""
        self.tokens += tokens
        self.is_own += [speaker == "model"] * len(tokens)
        self.turns.append({"from": speaker, "text": text})

    def add_reward(self, reward: float) -> None:
        """Add a reward; nan adds nothing."""
        if not math.isnan(reward):
            self.reward = reward if math.isnan(self.reward) else self.reward + reward

    def finished(self) -> Episode:
        """Return the finished episode."""
        return Episode(
            tuple(token for one in self.answers for token in one.ids),
            tuple(value for one in self.answers for value in one.log_probs),
            sum(one.entropy for one in self.answers),
            self.ended,
            tokens=tuple(self.tokens),
            digests=tuple(self.digests),
            sample=self.sample(),
            text=self.turns[-1]["text"],
            shown=" ".join(one["text"] if one["from"] == "model" else f"[{one['text']}]" for one in self.turns),
            columns={"turns": self.turns},
            reward=self.reward,
        )


class Episodes(Drawer):
    """Draws episodes with the user's class. A prompt is computed once for its first turns; every later turn computes
    all tokens before it anew."""

    columns: ClassVar = ("turns",)

    def __init__(self, plan: Plan) -> None:
        own, rl = plan.args.own["environment"], plan.args.own["rl"]
        self._name, self._kind, self._dataset = own.environment, class_of_file(own.environment), plan.steps.dataset
        self._max_turns, self._max_turn_length = own.max_turns, own.max_turn_length
        self._at_once = rl.per_device_generation_batch_size
        self._judges_alone = rl.reward_funcs is None and rl.reward_model_name_or_path is None
        self._images, self._tokenizer, self._encoder = plan.images, plan.model.tokenizer, ObservationEncoder(plan)
        self._tiles: dict[bytes, tuple[torch.Tensor, MediaLayout]] = {}  # of a draw: equal images are computed once
        self.reward = Reward("environment", 1.0, lambda answers: [one.own for one in answers], of_user=True)

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Begin an episode, and pass on the reference as the model's turn."""
        rules = TurnRules(**{**vars(rules), "num_answers": 1})
        [play] = self._begin(asked, (0,), rules)
        self._go_on(play, asked.reference, rules)

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        rules = TurnRules(**vars(rules), turn=self._max_turn_length)
        self._tiles.clear()
        groups = [self._begin(asked, seed, rules) for asked, seed in zip(prompts, seeds)]
        self._draw_turn(model, groups, [numbers_for(rules, *seed) for seed in seeds], rules)
        for turn in range(1, self._max_turns):
            going = [
                ([play], np.random.default_rng([*seed, turn, i]).random((1, rules.max_new_tokens)))
                for group, seed in zip(groups, seeds)
                for i, play in enumerate(group)
                if not play.is_over
            ]
            self._draw_turn(model, *([each[i] for each in going] for i in (0, 1)), replace(rules, num_answers=1))
        return [(group[0].asked, [play.finished() for play in group]) for group in groups]

    def _draw_turn(self, model: LlavaModel, groups: list[list[Play]], numbers: list, rules: TurnRules) -> None:
        """Draw a turn of every play, a few groups at a time. The plays of a group have the same tokens so far."""
        for first in range(0, len(groups), self._at_once):
            some = slice(first, first + self._at_once)
            samples = [group[0].sample() for group in groups[some]]
            for group, answers in zip(groups[some], draw_answers(model, samples, numbers[some], rules)):
                for play, answer in zip(group, answers):
                    self._take(play, answer, rules)

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        def total(number) -> float:
            return float(sum(np.mean([number(each) for each in group]) for group in groups))

        turns = total(lambda each: sum(one["from"] == "model" for one in each.columns["turns"]))
        return {"episodes/turns": turns, "episodes/bound_ratio": total(lambda each: not each.ended)}

    def _begin(self, asked: RolloutPrompt, seed: Sequence[int], rules: TurnRules) -> list[Play]:
        """Begin G episodes of a prompt. Raises DataError if they don't begin alike."""
        media = media_from_text(self._dataset.row(int(self._dataset.rows[asked.index]))["media"])
        pictures = [load_images(one.media, one.sizes, self._images) for one in media if one.media.kind == "image"]
        record = {**asked.columns, "id": asked.id, "prompt": asked.text, "reference": asked.reference}
        record["images"] = [image for each in pictures for image in each]
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        games = [Game(self._name, asked.id) for _ in range(rules.num_answers)]
        shown = [game.begin(self._kind, {**record, "images": [*record["images"]]}, number) for game in games]
        with games[0].named():
            if len({one and (one.text, *map(_digest, one.images)) for one in shown}) > 1:
                raise DataError("reset gave several observations for one record and seed: make it depend on these only")
            if shown[0] is not None:
                asked = self._opened(asked, shown[0], rules)
        return [Play(asked, game) for game in games]

    def _opened(self, asked: RolloutPrompt, shown: Observation, rules: TurnRules) -> RolloutPrompt:
        """Return the prompt with an observation in place of the record's question."""
        media = [self._media(image) for image in shown.images]
        ids = torch.tensor(self._encoder.first(shown, [layout.mark for _, layout in media]))
        if len(ids) >= rules.max_length:
            raise _too_long("reset", ids, shown, f"--model_max_length is {rules.max_length}")
        sample = LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), media, asked.sample.source)
        return replace(asked, sample=sample, text=shown.text)

    def _media(self, image: Image.Image) -> tuple[torch.Tensor, MediaLayout]:
        try:
            digest = _digest(image)
            if digest not in self._tiles:
                self._tiles[digest] = tiles_of(image, self._images)
        except Exception as error:  # Pillow's decoders raise almost any type on broken files
            raise DataError(f"an image can't be used: {in_short(str(error))}") from error
        return self._tiles[digest]

    def _take(self, play: Play, answer: Answer, rules: TurnRules) -> None:
        """Add a drawn turn. One without an end marker was cut short by a bound, and ends the episode."""
        text = self._tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
        play.answers.append(answer)
        play.add(answer.ids, "model", text)
        play.is_over = not answer.ended
        if answer.ended:
            self._go_on(play, text, rules)
        if play.is_over:
            play.add_reward(play.game.last_reward())
            if play.ended and math.isnan(play.reward) and self._judges_alone:
                with play.game.named():
                    raise DataError(f"no reward came, and {FLAG} alone judges: return one, or name --reward_funcs")

    def _go_on(self, play: Play, text: str, rules: TurnRules) -> None:
        """Pass the model's turn to the environment, and add its observation if another turn may follow."""
        shown, reward, play.ended = play.game.step(text)
        play.add_reward(reward)
        play.is_over = play.ended or play.game.turn == self._max_turns
        if play.is_over:
            return
        with play.game.named():
            media = [self._media(image) for image in shown.images]
            ids = self._encoder.between(shown, [layout.mark for _, layout in media])
            if len(ids) >= rules.max_new_tokens:
                raise _too_long("step", ids, shown, f"--max_completion_length is {rules.max_new_tokens}")
        if rules.left(play.sample()) <= len(ids):
            play.is_over = True
            return
        play.media += media
        play.digests += map(_digest, shown.images)
        play.add(ids, "environment", f"{f'{IMAGE_TOKEN} ' * len(media)}{shown.text}".strip())


def _digest(image: Image.Image) -> bytes:
    return hashlib.sha256(f"{image.mode} {image.size} ".encode() + image.tobytes()).digest()


def _too_long(what: str, ids: Sequence[int], shown: Observation, bound: str) -> DataError:
    return DataError(
        f"{what} gave an observation of {len(ids):,} tokens with {len(shown.images)} images, but {bound}: give less, "
        "or raise it"
    )
