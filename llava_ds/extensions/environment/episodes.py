# G episodes of a prompt
"""Draw episodes: turns of the model, with an environment's texts and images between them."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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

Tiles = tuple[torch.Tensor, MediaLayout]  # of an image


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
    """An episode in progress. sample: the prompt with all turns so far, supervised at the model's tokens; reward: nan
    while there is none; ended: the environment ended it; is_over: it or a bound did."""

    game: Game
    sample: Continued
    digests: list[bytes] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)
    reward: float = math.nan
    ended: bool = False
    is_over: bool = False

    def add(self, tokens: Sequence[int], speaker: str, text: str, media: Sequence[Tiles] = ()) -> None:
        """Add a turn."""
        old, ids = self.sample, torch.tensor(tokens, dtype=torch.int64)
        labels = ids if speaker == "model" else torch.full_like(ids, IGNORE_INDEX)
        both = torch.cat([old.input_ids, ids]), torch.cat([old.labels, labels])
        self.sample = Continued(*both, [*old.media, *media], old.source, used=old.used + len(ids))
        self.turns.append({"from": speaker, "text": text})

    def add_reward(self, reward: float) -> None:
        """Add a reward; nan adds nothing."""
        if not math.isnan(reward):
            self.reward = reward if math.isnan(self.reward) else self.reward + reward

    def finished(self) -> Episode:
        """Return the finished episode."""
        ids, used = self.sample.input_ids, self.sample.used
        return Episode(
            tuple(token for one in self.answers for token in one.ids),
            tuple(value for one in self.answers for value in one.log_probs),
            sum(one.entropy for one in self.answers),
            self.ended,
            tokens=tuple(ids[len(ids) - used :].tolist()),
            digests=tuple(self.digests),
            sample=self.sample,
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
        self._judges_alone = rl.reward_funcs is None and rl.reward_model_name_or_path is None
        self._images, self._tokenizer, self._encoder = plan.images, plan.model.tokenizer, ObservationEncoder(plan)
        self._tiles: dict[bytes, Tiles] = {}  # of a draw: equal images are computed once
        self.reward = Reward("environment", 1.0, lambda answers: [one.own for one in answers], of_user=True)

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Begin an episode, and pass on the reference as the model's turn."""
        rules = TurnRules(**{**vars(rules), "num_answers": 1})
        _, [play] = self._begin(asked, (0,), rules)
        self._go_on(play, asked.reference, rules)

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        rules = TurnRules(**vars(rules), turn=self._max_turn_length)
        self._tiles.clear()
        begun = [self._begin(asked, seed, rules) for asked, seed in zip(prompts, seeds)]
        groups = [plays for _, plays in begun]
        self._draw_turn(model, groups, [numbers_for(rules, *seed) for seed in seeds], rules)
        for turn in range(1, self._max_turns):
            seeded = [(play, [*seed, turn, i]) for group, seed in zip(groups, seeds) for i, play in enumerate(group)]
            going = [(play, seed) for play, seed in seeded if not play.is_over]
            numbers = [np.random.default_rng(seed).random((1, rules.max_new_tokens)) for _, seed in going]
            self._draw_turn(model, [[play] for play, _ in going], numbers, replace(rules, num_answers=1))
        return [(asked, [play.finished() for play in plays]) for asked, plays in begun]

    def _draw_turn(self, model: LlavaModel, groups: list[list[Play]], numbers: list, rules: TurnRules) -> None:
        """Draw a turn of every play. The plays of a group have the same tokens so far."""
        answers = draw_answers(model, [group[0].sample for group in groups], numbers, rules)
        for play, answer in zip(chain(*groups), chain(*answers)):
            self._take(play, answer, rules)

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        def total(number) -> float:
            return float(sum(np.mean([number(each) for each in group]) for group in groups))

        turns = total(lambda each: sum(one["from"] == "model" for one in each.columns["turns"]))
        return {"episodes/turns": turns, "episodes/bound_ratio": total(lambda each: not each.ended)}

    def _begin(self, asked: RolloutPrompt, seed: Sequence[int], rules: TurnRules) -> tuple[RolloutPrompt, list[Play]]:
        """Begin G episodes of a prompt. Returns also the prompt as it is asked. Raises DataError if they don't begin
        alike."""
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
        sample = Continued(**vars(asked.sample))
        return asked, [Play(game, sample) for game in games]

    def _opened(self, asked: RolloutPrompt, shown: Observation, rules: TurnRules) -> RolloutPrompt:
        """Return the prompt with an observation in place of the record's question."""
        media = [self._media(image) for image in shown.images]
        ids = torch.tensor(self._encoder.first(shown, [layout.mark for _, layout in media]))
        if len(ids) >= rules.max_length:
            raise _too_long("reset", ids, shown, f"--model_max_length is {rules.max_length}")
        sample = LoadedSample(ids, torch.full_like(ids, IGNORE_INDEX), media, asked.sample.source)
        return replace(asked, sample=sample, text=shown.text)

    def _media(self, image: Image.Image) -> Tiles:
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
        if rules.left(play.sample) <= len(ids):
            play.is_over = True
            return
        play.digests += map(_digest, shown.images)
        play.add(ids, "environment", f"{f'{IMAGE_TOKEN} ' * len(media)}{shown.text}".strip(), media)


def _digest(image: Image.Image) -> bytes:
    facts = image.mode, image.size, image.getpalette(), image.info.get("transparency")
    return hashlib.sha256(repr(facts).encode() + image.tobytes()).digest()


def _too_long(what: str, ids: Sequence[int], shown: Observation, bound: str) -> DataError:
    return DataError(
        f"{what} gave an observation of {len(ids):,} tokens with {len(shown.images)} images, but {bound}: give less, "
        "or raise it"
    )
