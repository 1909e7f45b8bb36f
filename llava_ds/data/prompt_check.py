"""Check that the prompt for an answer is a prefix of the text in which the answer is learned, token by token.

Chat templates of reasoning models end the prompt inside an open thought, or after an empty one, but may omit that
thought before an existing answer: training then never shows such a prompt. The check renders a few test
conversations per template and set of variables, not every record.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.encode import Encoded, Encoder
from llava_ds.data.end_markers import endless
from llava_ds.data.jinja_templates import own_template
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.sources import Source, to_sample
from llava_ds.data.turn_form import holds_thought
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.layouts import ImageText
from llava_ds.template_variables import FLAG, default_values, read_variables
from llava_ds.videos import Footage

# Two beginnings of answers, because the tokenizer may join a token of the prompt with some beginnings.
ANSWERS = ("A circle.", "7 of them.")
THOUGHT = "It is round."
# Tool call next to a thought, for templates that write thoughts only with calls.
CALL = json.dumps([{"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"at": "it"}}}])
_QUESTION = "What is it?"
NUM_RECORDS = 16  # records per source that are checked before all are encoded
_SIZE, _FRAMES = (64, 64), 4  # the test image's size, the test video's number of frames
_SHOWN = 200  # characters of a text shown in a message

Marks = Sequence[int | ImageText]


@dataclass(frozen=True)
class Difference:
    """A mismatch of prompt and training text. asked, learned: the prompt's and the training text's part after the
    question; why: how they differ."""

    asked: str
    learned: str
    why: str

    def lines(self) -> str:
        """Both texts, each on its own line."""
        return f"  asked:   {self.asked[:_SHOWN]!r}\n  learned: {self.learned[:_SHOWN]!r} ({self.why})"

    def clause(self) -> str:
        """Both texts in one line."""
        return f"asked is {self.asked[:_SHOWN]!r}, learned {self.learned[:_SHOWN]!r} ({self.why})"


@dataclass(frozen=True)
class AnswerForms:
    """Results of the check. plain, thought: mismatch for answers without and with a thought, None if they match;
    writes_plain, writes_thought: True if the template writes such answers."""

    plain: Difference | None
    thought: Difference | None
    writes_plain: bool
    writes_thought: bool

    def difference_for(self, answer: Message | None) -> Difference | None:
        """Return the mismatch that applies to an answer, or None."""
        if answer is None or (self.plain is None and self.thought is None):
            return None
        return self.thought if has_thought(answer) and self.writes_thought else self.plain

    def fits(self, with_thought: bool) -> bool:
        """True if the template writes plain answers (or answers with a thought) without a mismatch."""
        if with_thought:
            return self.writes_thought and self.thought is None
        return self.writes_plain and self.plain is None


def last_answer(transcript: Transcript) -> Message | None:
    """Last answer of a conversation; None if missing or not learned."""
    last = next((message for message in reversed(transcript.messages) if message.role == "gpt"), None)
    return None if last is None or last.weight == 0 else last


def has_thought(answer: Message) -> bool:
    """True for an answer with a non-empty thought."""
    return bool(answer.thought and answer.thought.strip()) or holds_thought(answer)


@dataclass(eq=False)
class PromptCheck:
    """The check for one encoder. Conversations are rendered once per set of variables. Can be pickled."""

    encoder: Encoder
    images: ImageOptions
    _found: dict[tuple[str, bool], AnswerForms] = field(default_factory=dict)
    _remedies: dict[bool, str] = field(default_factory=dict)
    _faults: dict[str, str] = field(default_factory=dict)

    def forms(self, variables: str = "", with_video: bool = False) -> AnswerForms:
        """Return the results under template variables. variables: a JSON object, "" for none; with_video: test a
        conversation with a video."""
        key = (variables, with_video)
        if key not in self._found:
            plain, thinking = (list(self._differences(*key, thought)) for thought in (None, THOUGHT))
            found = plain, thinking or list(self._differences(*key, THOUGHT, CALL))
            first = [next(filter(None, each), None) for each in found]
            self._found[key] = AnswerForms(*first, *map(bool, found))
        return self._found[key]

    @cached_property
    def is_settled(self) -> bool:
        """True if no record needs checking: last answers are never learned, or one of LLaVA's templates (which read no
        variables) is used and matches for all answers."""
        if self.encoder.options.answer_is_reference:
            return True
        forms = self.forms() if self.encoder.template.write is not None else None
        return forms is not None and forms.plain is None and forms.thought is None

    def reason(self, transcript: Transcript, marks: Marks) -> str:
        """Explain how the training text before a record's last answer differs from the prompt; "" if they match."""
        if self.is_settled:
            return ""
        if (variables := transcript.template_kwargs) and (fault := self._endless(variables)):
            return f"under its chat_template_kwargs, {fault}"
        with_video = any([isinstance(mark, ImageText) and mark.is_video for mark in marks])
        forms = self.forms(transcript.template_kwargs, with_video)
        answer = last_answer(transcript)
        difference = forms.difference_for(answer)
        if difference is None and self._may_join(transcript):
            with contextlib.suppress(DataError):  # the encoder raises it as well
                if (joined := self._compare(transcript, marks)) is not None:
                    return f"its last answer begins with a line break: {joined.clause()}: take the line break away"
        if difference is None:
            return ""
        thinks = has_thought(answer)
        has = "a thought" if thinks else "no thought"
        text = f"its last answer has {has}, but the prompt for it differs from the text before it in training: "
        if transcript.template_kwargs:
            return text + difference.clause()
        if thinks not in self._remedies:
            self._remedies[thinks] = _remedy(self, {thinks}, of_record=True)
        return f"{text}{difference.clause()}: {self._remedies[thinks]}"

    def _endless(self, variables: str) -> str:
        """Describe the problem with the end of answers under a record's variables; "" if fine. The run's own variables
        are checked before any record is read."""
        if variables not in self._faults:
            self._faults[variables] = endless(self.encoder.options.template, self.encoder.tokenizer, variables)
        return self._faults[variables]

    def note_on_earlier(self) -> str:
        """Return a note if earlier answers of a conversation are not learned after their prompts, else "". Some
        templates omit the (possibly empty) thought before earlier answers, but write it before the last one."""
        question, answer = Message("human", _QUESTION), Message("gpt", ANSWERS[0])
        try:
            asked = self.encoder.texts(Transcript((question, answer)), ())[0]
            learned = self.encoder.texts(Transcript((question, answer) * 2), ())[1]
        except DataError:
            return ""
        if self.encoder.options.supervise_last_turn_only or learned.startswith(asked):
            return ""
        place = asked.index(_QUESTION) + len(_QUESTION)
        written = learned[place : learned.index(ANSWERS[0])]
        return (
            f"earlier answers of a conversation are learned after {written!r}, as the chat template writes them, but "
            f"generated after {asked[place:]!r}: --supervise_last_turn_only True learns the last ones alone"
        )

    def _may_join(self, transcript: Transcript) -> bool:
        """True if the last answer begins with a line break: the tokenizer may join it with one in the prompt. False for
        LLaVA's own templates, because their ids must match LLaVA's."""
        last = transcript.messages[-1]
        begins = (last.thought or last.text)[:1]
        return self.encoder.template.write is None and last.role == "gpt" and begins in ("\n", "\r")

    def _differences(
        self, variables: str, with_video: bool, thought: str | None, calls: str = ""
    ) -> Iterator[Difference | None]:
        """Yield the mismatch, or None, for each test conversation that the template writes: without and with an image,
        or with a video. thought, calls: the answer's, as in Message."""
        shown = [[self._video()]] if with_video else [[], [media_layout("image", (_SIZE,), 1, self.images).mark]]
        for marks in shown:
            question = Message("human", f"{IMAGE_TOKEN}\n{_QUESTION}" if marks else _QUESTION)
            for answer in ANSWERS:
                messages = (question, Message("gpt", "" if calls else answer, thought, calls))
                conversation = Transcript(messages, template_kwargs=variables)
                with contextlib.suppress(DataError):  # every affected record reports this error
                    if thought is None or thought in self.encoder.texts(conversation, marks)[1]:
                        yield self._compare(conversation, marks) or self._empty_thought(conversation, marks)

    def _empty_thought(self, conversation: Transcript, marks: Marks) -> Difference | None:
        """Return the mismatch for a plain answer if its prompt ends inside an open thought, but the training text has
        an empty thought. With some tokenizers, the tokens alone don't show it."""
        *before, answer = conversation.messages
        if answer.thought:
            return None
        thinking = replace(conversation, messages=(*before, replace(answer, thought=THOUGHT)))
        try:
            asked, plain = self.encoder.texts(conversation, marks)
            asked_too, thought = self.encoder.texts(thinking, marks)
        except DataError:  # the template doesn't support thoughts
            return None
        begin, thinks = plain[len(asked) :].lstrip(), thought[len(asked_too) :].lstrip()
        if begin.startswith(answer.text) or not (thought.startswith(asked_too) and thinks.startswith(THOUGHT)):
            return None
        return _difference_of(asked, plain, "a thought is asked for, and an empty one learned")

    def _video(self) -> ImageText:
        layout = media_layout("frames", (_SIZE,) * _FRAMES, 1, self.images, Footage(_FRAMES, 1.0))
        return layout.mark

    def _compare(self, conversation: Transcript, marks: Marks) -> Difference | None:
        encoder, asked = self.encoder, replace(conversation, messages=conversation.messages[:-1])
        texts = encoder.texts(conversation, marks)
        why = _why(encoder.prompt_ids(asked, marks), encoder.encode_whole(conversation, marks), texts)
        return None if why is None else _difference_of(*texts, why)


def _difference_of(asked: str, learned: str, why: str) -> Difference:
    """Build the mismatch from both texts' parts after the test question, or near the end of a record's prompt."""
    known = asked.rfind(_QUESTION)
    place = max(0, len(asked) - _SHOWN // 2) if known < 0 else known + len(_QUESTION)
    return Difference(asked[place:], learned[place:], why)


def _why(prompt: list[int], whole: Encoded, texts: tuple[str, str]) -> str | None:
    """Explain why a prompt is not a prefix of the training tokens; None if it is one and everything after it is
    learned."""
    if whole.input_ids[: len(prompt)].tolist() != prompt:
        if texts[1].startswith(texts[0]):
            return "the texts begin alike, but their tokens differ where the first one ends"
        return "they begin differently"
    behind = whole.labels[len(prompt) :] != IGNORE_INDEX
    if not behind.any():
        return "no token after the prompt is learned"
    last = int(np.flatnonzero(behind)[-1])
    return None if behind[:last].all() else "not every token after the prompt is learned"


def with_generation_prompt(encoder: Encoder, conversation: Transcript, marks: Marks, coded: Encoded) -> Encoded:
    """Prefix an encoded conversation with the generation prompt of its last answer; only that answer is supervised.

    coded: the conversation as encoded for training; its tokens after the prompt are used if they are only the answer.
    Raises DataError for a prompt token beyond the rows of the model's embedding.
    """
    *before, answer = conversation.messages
    if answer.role != "gpt" or not coded.num_targets:
        return coded
    prompt = np.array(encoder.prompt_ids(replace(conversation, messages=tuple(before)), marks), np.int32)
    ids, count = coded.input_ids, len(prompt)
    if not np.array_equal(ids[:count], prompt[: len(ids)]) or not _is_next(encoder, conversation, marks):
        ids = np.concatenate([prompt, encoder.text_ids(answer.text.strip())])
    labels = np.where(np.arange(len(ids)) < count, np.int32(IGNORE_INDEX), ids)
    weights = None if coded.weights is None else np.where(labels == IGNORE_INDEX, 1, answer.weight).astype(np.float32)
    return Encoded(ids, labels, coded.truncated, weights).cut(encoder.options.max_length)


def _is_next(encoder: Encoder, conversation: Transcript, marks: Marks) -> bool:
    """True if the last answer follows the prompt directly or after spaces only."""
    if encoder.template.write is not None:
        return True
    asked, learned = encoder.texts(conversation, marks)
    return learned[len(asked) :].lstrip().startswith(conversation.messages[-1].text.strip())


def refuse_unmatched_prompts(check: PromptCheck, sources: Sequence[Source]) -> None:
    """Raise ConfigError if no answer in the first records of all sources matches its prompt.

    Single mismatching records are reported by PromptCheck.reason.
    """
    if check.encoder.options.answer_is_reference:
        return
    forms = check.forms()
    if forms.plain is None and forms.thought is None:
        return
    found = []
    for source in sources:
        for record in source.first(NUM_RECORDS):
            try:
                transcripts = to_sample(record.text, source, record.index).transcripts
            except DataError:
                continue
            found += transcripts
    answers = [last_answer(transcript) for transcript in found]
    differences = [check.forms(each.template_kwargs).difference_for(answer) for each, answer in zip(found, answers)]
    if not found or None in differences:
        return
    with_thoughts = {has_thought(answer) for answer in answers}
    kinds = {frozenset({False}): "no thought", frozenset({True}): "a thought"}
    have = kinds.get(frozenset(with_thoughts), "a thought or none")
    raise ConfigError(
        f"the answers of the first {len(found)} records have {have}, but the prompt for them differs from the text "
        f"before them in training. After a question, the chat template writes\n{differences[0].lines()}\n"
        f"The prompt must be the beginning of the training text: {_remedy(check, with_thoughts)}"
    )


def _remedy(check: PromptCheck, with_thoughts: set[bool], of_record: bool = False) -> str:
    """Suggest a remedy for answers that don't match their prompts. with_thoughts: has True for answers with a
    thought, False for answers without; of_record: suggest a change to a single record, not to the run."""
    if check.encoder.template.write is not None:
        return "give another --version"
    if (variables := fitting_variables(check, with_thoughts)) is not None:
        return f"give it {FLAG} {variables}" if of_record else f"give --{FLAG} '{variables}', under which it is"
    if of_record:
        return "write its thought into the record" if False in with_thoughts else "take the thought out"
    template = check.encoder.options.template
    others = ["give --version one of LLaVA's templates"] if template == "chat_template" else []
    if False in with_thoughts:
        others.append("use answers with thoughts (reasoning_content in a turn)")
    else:
        others.append("take the thoughts out of the answers")
    tokenizer = check.encoder.tokenizer
    if names := read_variables(own_template(tokenizer), tokenizer):
        others.append(
            f"give values besides true and false to the template's variables ({', '.join(sorted(names))}) by --{FLAG}"
        )
    others.append("put another chat template into the model's folder (chat_template.jinja)")
    return ", or ".join(others)


def fitting_variables(check: PromptCheck, with_thoughts: set[bool]) -> str | None:
    """Find template variables under which these answers match: a JSON object with one variable set to true or false, or
    None."""
    tokenizer = check.encoder.tokenizer
    source = own_template(tokenizer)
    kept = default_values(source)
    names = read_variables(source, tokenizer)
    for name in sorted(names, key=lambda name: ("think" not in name, name)):
        for value in (False, True):
            variables = json.dumps({**kept, name: value})
            forms = check.forms(variables)
            if all(map(forms.fits, with_thoughts)):
                return variables
    return None
