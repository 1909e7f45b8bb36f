"""Answer with a judge that chooses the better of two given answers, or the best of several sampled answers."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.data.encode import Encoder, EncodingOptions, encoder_of
from llava_ds.data.end_markers import end_markers
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.infer.formats import CHECKPOINT_FLAGS
from llava_ds.extensions.infer.generate import Answer, Prompt, decode_media, media_of
from llava_ds.extensions.infer.infer_flags import EngineOptions
from llava_ds.files.model_files import ADAPTER_CONFIG, is_there
from llava_ds.model.open.names import value_head_file
from llava_ds.runtime.ranks import Ranks
from llava_ds.second_models.frozen import FrozenPlan, Scorer, open_frozen, plan_alone
from llava_ds.train.evaluating.sampling import DrawRules, draw_answers, numbers_for
from llava_ds.train.evaluating.twin import make_twin


class Judge:
    """A model that scores answers with its value head, or by their log-probability if it has no value head."""

    def __init__(self, flag: str, path: str, options: EngineOptions, ranks: Ranks, must_score: bool = False) -> None:
        """Load the judge. flag: the flag that names its folder; must_score: require a value head. Collective."""
        plan = _plan(flag, path, options, must_score)
        self.has_value_head = plan.model.has_value_head
        self._model = Scorer(plan, options.precision or torch.float32, ranks)
        self._plan, self._encoder = plan, _encoder(plan)

    def describe(self) -> str:
        """Return a line that says how answers are scored."""
        return "answers are judged by " + ("the value head" if self.has_value_head else "their log-probability")

    def scores(self, prompts: list[Prompt], answers: list[list[str]]) -> list[list[float]]:
        """Return the score of each answer to each prompt."""
        samples = [self._samples(prompt, texts) for prompt, texts in zip(prompts, answers, strict=True)]
        found = iter(self._model.scores([sample for some in samples for sample in some]))
        return [[next(found) for _ in some] for some in samples]

    def _samples(self, prompt: Prompt, answers: list[str]) -> list[LoadedSample]:
        """Return a sample for each of the answers: the prompt, its images and the answer."""
        media = media_of(prompt, self._plan.images)
        features = [layout.mark for *_, layout in media]
        tiles = decode_media(media, prompt.blank, self._plan.images)
        answered = [(prompt.answered(text), features) for text in answers]
        coded = self._encoder.encode_batch(answered)
        for text, one in zip(answers, coded):
            if isinstance(one, DataError) or not one.num_targets:
                why = one if isinstance(one, DataError) else "it has no tokens"
                raise DataError(f"the answer {text!r:.80} can't be judged: {why}")
        return [
            LoadedSample(torch.from_numpy(one.input_ids).long(), torch.from_numpy(one.labels).long(), tiles)
            for one in coded
        ]


@dataclass(frozen=True)
class Preferring:
    """Answers each question with the one of its two answers that the judge prefers, the chosen answer if both tie."""

    judge: Judge

    def __call__(self, questions: list[Question], numbers: list[int]) -> list[Answer]:
        pairs = [[question.reference, question.more["rejected"]] for question in questions]
        scores = self.judge.scores([question.prompt for question in questions], pairs)
        return [
            # log of the probability that the preferred answer is better, as in training on pairs
            Answer(pair[b > a], -math.log1p(math.exp(-abs(a - b))), 0)
            for pair, (a, b) in zip(pairs, scores)
        ]


class BestOfN:
    """Answers each question with the best-scored of n sampled answers."""

    def __init__(
        self, path: str, judge: Judge, rules: tuple[int, int, int], options: EngineOptions, ranks: Ranks
    ) -> None:
        """Load the answering model. rules: n, the maximum tokens per answer, and the sampling seed. Collective."""
        self._plan, self._judge = _plan("--model_path", path, options, False), judge
        count, max_new_tokens, self._seed = rules
        self._encoder, self._tokenizer = _encoder(self._plan), self._plan.model.tokenizer
        ends = tuple(end_markers(self._encoder.options.template, self._tokenizer))
        length = getattr(self._plan.model.text_config, "max_position_embeddings", None) or 2**31
        self._rules = DrawRules(count, max_new_tokens, length, ends, self._plan.images)
        self._model = make_twin(open_frozen(self._plan, options.precision or torch.float32, ranks))

    def __call__(self, questions: list[Question], numbers: list[int]) -> list[Answer]:
        drawn = draw_answers(
            self._model,
            [self._prompt(question.prompt) for question in questions],
            [numbers_for(self._rules, self._seed, 0, number) for number in numbers],
            self._rules,
        )
        decode = self._tokenizer.decode
        texts = [[decode(one.ids, skip_special_tokens=True).strip() for one in some] for some in drawn]
        scores = self._judge.scores([question.prompt for question in questions], texts)
        answers = []
        for some, own, of in zip(drawn, texts, scores):
            best = max(range(len(of)), key=of.__getitem__)  # the first of equal scores
            answers.append(Answer(own[best], round(sum(some[best].log_probs), 4), len(some[best].ids)))
        return answers

    def _prompt(self, prompt: Prompt) -> LoadedSample:
        media = media_of(prompt, self._plan.images)
        ids = torch.tensor(self._encoder.prompt_ids(prompt.transcript, [layout.mark for *_, layout in media]))
        sample = LoadedSample(ids, ids, decode_media(media, prompt.blank, self._plan.images))
        if self._rules.room(sample) < 1:
            raise DataError(f"a question has {len(ids):,} tokens: the model has no positions left for an answer")
        return sample


def _plan(flag: str, path: str, options: EngineOptions, must_score: bool) -> FrozenPlan:
    """Plan a model for judging or sampling. Raises ConfigError for folders and options that it doesn't support."""
    if options.engine != "hf":
        raise ConfigError(f"--engine {options.engine} can't judge or sample answers: leave it out")
    if given := [f"--{name}" for name in CHECKPOINT_FLAGS if name in options.moved]:
        raise ConfigError(f"{', '.join(given)} needs a checkpoint: give the folder that run/export.py makes from it")
    if not any(is_there(Path(path) / name) for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(f"{flag} {path} has no config.json: give an exported folder (run/export.py makes one)")
    named = {"version": options.version, "chat_template_kwargs": options.chat_template_kwargs}
    given = {name: value for name, value in named.items() if value is not None}
    return plan_alone(flag, path, 1, must_score or value_head_file(path) is not None, **options.moved, **given)


def _encoder(plan: FrozenPlan) -> Encoder:
    """Return the encoder of training, without a length limit, and supervising the last answer only."""
    args = plan.args
    options = EncodingOptions(
        args.version,
        2**31,
        args.mm_use_im_start_end,
        supervise_last_turn_only=True,
        split_special_tokens=args.split_special_tokens,
    )
    return encoder_of(plan.model.tokenizer, options, plan.images)
