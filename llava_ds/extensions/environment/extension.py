"""Sample episodes: turns of the model, with an environment's texts and images between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, DataError, in_short
from llava_ds.data.collate import LoadedSample
from llava_ds.data.encoded_rows import media_from_text
from llava_ds.data.images.decode import load_images
from llava_ds.data.images.in_memory import tiles_of
from llava_ds.extensions.base import Extension
from llava_ds.extensions.environment.user_class import FLAG, Game, Observation, ObservationEncoder, class_of_file
from llava_ds.extensions.rl.drawer import Drawer, Episode, RolloutPrompt
from llava_ds.extensions.rl.rewards import Reward
from llava_ds.geometry import media_layout
from llava_ds.layouts import MediaLayout
from llava_ds.model.llava import LlavaModel
from llava_ds.runtime.ranks import on_every_rank
from llava_ds.train.evaluating.sampling import Answer, DrawRules, draw_answers, numbers_for
from llava_ds.train.plan import Plan

Tiles = tuple[torch.Tensor, MediaLayout]  # the tiles and layout of an image
SEVERAL = 2  # number of images to choose the layout for, because a single image may get another layout


@dataclass(frozen=True)
class TurnRules(DrawRules):
    """Rules for sampling a turn. max_new_tokens: limit per episode, including observations; turn: limit per turn."""

    turn: int | None = None

    def left(self, prompt: LoadedSample) -> int:
        """Return the number of tokens left in the episode."""
        return min(self.max_new_tokens - used(prompt), self.max_length - len(prompt.input_ids))

    def room(self, prompt: LoadedSample) -> int:
        return self.left(prompt) if self.turn is None else min(self.left(prompt), self.turn)


def used(sample: LoadedSample) -> int:
    """Return the number of tokens after the prompt, that is, from the model's first turn on."""
    return int((sample.labels != IGNORE_INDEX).cummax(0).values.sum())


@dataclass(eq=False)
class Play:
    """An episode in progress. sample: the prompt with all turns so far, supervised at the model's tokens; ended: True
    if the environment ended the episode; is_over: True if the environment or a limit ended it."""

    game: Game
    sample: LoadedSample
    digests: list[bytes] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: bool = False
    is_over: bool = False

    def add(self, tokens: Sequence[int], speaker: str, text: str, media: Sequence[Tiles] = ()) -> None:
        """Append a turn to the sample. speaker: "model" or "environment"; only the model's tokens are supervised."""
        old, ids = self.sample, torch.tensor(tokens, dtype=torch.int64)
        labels = ids if speaker == "model" else torch.full_like(ids, IGNORE_INDEX)
        both = torch.cat([old.input_ids, ids]), torch.cat([old.labels, labels])
        self.sample = LoadedSample(*both, [*old.media, *media], old.source)
        self.turns.append({"from": speaker, "text": text})

    def finished(self) -> Episode:
        """Return the finished episode."""
        return Episode(
            tuple(token for one in self.answers for token in one.ids),
            tuple(value for one in self.answers for value in one.log_probs),
            sum(one.entropy for one in self.answers),
            self.ended,
            tokens=tuple(self.sample.input_ids[len(self.sample.input_ids) - used(self.sample) :].tolist()),
            digests=tuple(self.digests),
            sample=self.sample,
            text=self.turns[-1]["text"],
            shown=" ".join(one["text"] if one["from"] == "model" else f"[{one['text']}]" for one in self.turns),
            columns={"turns": self.turns},
            reward=sum(self.rewards) if self.rewards else math.nan,
        )


class Episodes(Drawer):
    """Samples episodes with the user's class. Sampling a turn recomputes all tokens before it."""

    columns: ClassVar = ("turns",)

    def __init__(self, plan: Plan) -> None:
        own, rl = plan.args.own["environment"], plan.args.own["rl"]
        self._name, self._kind, self._dataset = own.environment, class_of_file(own.environment), plan.steps.dataset
        self._max_turns, self._max_turn_length = own.max_turns, own.max_turn_length
        self._judges_alone = rl.reward_funcs is None and rl.reward_model_name_or_path is None
        self._images, self._tokenizer, self._encoder = plan.images, plan.model.tokenizer, ObservationEncoder(plan)
        self._tiles: dict[bytes, Tiles] = {}  # by digest, so that draw() preprocesses equal images once
        self.reward = Reward("environment", 1.0, lambda answers: [one.own for one in answers], of_user=True)

    def try_out(self, asked: RolloutPrompt, rules: DrawRules) -> None:
        """Test the user's class with one episode, in which the reference is the model's turn."""
        rules = TurnRules(**{**vars(rules), "num_answers": 1})
        _, [play] = self._begin(asked, (0,), rules)
        with play.game.named():
            self._go_on(play, asked.reference, rules)

    def draw(
        self, model: LlavaModel, prompts: list[RolloutPrompt], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[tuple[RolloutPrompt, list[Episode]]]:
        rules = TurnRules(**vars(rules), turn=self._max_turn_length)
        self._tiles.clear()
        begun = [self._begin(asked, seed, rules) for asked, seed in zip(prompts, seeds)]
        every = [(play, seed, i) for (_, plays), seed in zip(begun, seeds) for i, play in enumerate(plays)]
        groups = [plays for _, plays in begun]  # the plays of a group have the same tokens so far
        numbers = [numbers_for(rules, *seed) for seed in seeds]
        for turn in range(1, self._max_turns + 1):
            answers = draw_answers(model, [group[0].sample for group in groups], numbers, rules)
            for play, answer in zip(chain(*groups), chain(*answers)):
                self._take(play, answer, rules)
            going = [(play, [*seed, turn, i]) for play, seed, i in every if not play.is_over]
            groups = [[play] for play, _ in going]
            numbers = [np.random.default_rng(seed).random((1, rules.max_new_tokens)) for _, seed in going]
            rules = replace(rules, num_answers=1)
        return [(asked, [play.finished() for play in plays]) for asked, plays in begun]

    def metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        bound = sum(np.mean([not each.ended for each in group]) for group in groups)
        turns = sum(np.mean([1 + len(each.columns["turns"]) // 2 for each in group]) for group in groups)
        return {"episodes/turns": float(turns), "episodes/bound_ratio": float(bound)}

    def _begin(self, asked: RolloutPrompt, seed: Sequence[int], rules: TurnRules) -> tuple[RolloutPrompt, list[Play]]:
        """Begin a prompt's episodes with equal first observations. Also returns the prompt with this observation."""
        media = media_from_text(self._dataset.row(int(self._dataset.rows[asked.index]))["media"])
        shown = (load_images(one.media, one.sizes, self._images) for one in media if one.media.kind == "image")
        images = [*chain.from_iterable(shown)]
        record = {**asked.columns, "id": asked.id, "prompt": asked.text, "reference": asked.reference}
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        games = [Game(self._name, asked.id) for _ in range(rules.num_answers)]
        with games[0].named():
            shown = [game.begin(self._kind, {**record, "images": [*images]}, number) for game in games]
            if len({one and (one.text, *one.digests()) for one in shown}) > 1:
                raise DataError("reset gave several observations for one record and seed: make it depend on these only")
            if shown[0] is not None:
                ids, media = self._encoded("reset", shown[0], "--model_max_length", rules.max_length)
                nothing = torch.full((len(ids),), IGNORE_INDEX)
                sample = LoadedSample(torch.tensor(ids), nothing, media, asked.sample.source)
                asked = replace(asked, sample=sample, text=shown[0].text)
        return asked, [Play(game, asked.sample) for game in games]

    def _encoded(self, method: str, shown: Observation, flag: str, most: int) -> tuple[list[int], list[Tiles]]:
        """Return an observation's ids and tiles. Raises DataError for a broken image, or too many ids."""
        try:
            for key, image in zip(shown.digests(), shown.images):
                if math.prod(image.size) > (most_pixels := self._images.max_pixels):
                    size = f"{image.width} x {image.height}"
                    raise DataError(f"an image has {size} pixels, more than --max_image_pixels {most_pixels}")
                if key not in self._tiles:
                    layout = media_layout("image", (image.size,), SEVERAL, self._images)
                    self._tiles[key] = tiles_of(image, self._images), layout
        except Exception as error:  # Pillow's decoders raise almost any type on broken files
            raise DataError(f"an image can't be used: {in_short(str(error))}") from error
        media = [self._tiles[key] for key in shown.digests()]
        ids = self._encoder.ids(shown, [layout.mark for _, layout in media], opens=method == "reset")
        if len(ids) >= most:
            found = f"{method} gave an observation of {len(ids):,} tokens with {len(media)} images"
            raise DataError(f"{found}, but {flag} is {most}: give less, or raise it")
        return ids, media

    def _take(self, play: Play, answer: Answer, rules: TurnRules) -> None:
        """Add a sampled turn. If it has no end marker, a limit cut it short, and the episode ends."""
        text = self._tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
        play.answers.append(answer)
        play.add(answer.ids, "model", text)
        play.is_over = not answer.ended
        with play.game.named():
            if answer.ended:
                self._go_on(play, text, rules)
            if play.is_over:
                play.rewards += play.game.last_reward()
                if play.ended and not play.rewards and self._judges_alone:
                    raise DataError(f"no reward came, and only {FLAG} gives any: return one, or name --reward_funcs")

    def _go_on(self, play: Play, text: str, rules: TurnRules) -> None:
        """Pass the model's turn to the environment, and add the observation if the model may take another turn."""
        shown, rewards, play.ended = play.game.step(text)
        play.rewards += rewards
        play.is_over = play.ended or play.game.turn == self._max_turns
        if play.is_over:
            return
        ids, media = self._encoded("step", shown, "--max_completion_length", rules.max_new_tokens)
        play.is_over = rules.left(play.sample) <= len(ids)
        if not play.is_over:
            play.digests += shown.digests()
            play.add(ids, "environment", f"{f'{IMAGE_TOKEN} ' * len(media)}{shown.text}".strip(), media)


extension = Extension(complete=lambda plan, ranks: on_every_rank(ranks, lambda: Episodes(plan)))
