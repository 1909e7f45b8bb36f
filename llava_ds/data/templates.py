"""LLaVA's conversation templates: render to text segments, supervised or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llava_ds.constants import IM_END_TOKEN, IM_START_TOKEN, IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sample import Message

V1_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
V0_SYSTEM = V1_SYSTEM.replace("user", "human")
# No space after "language.", as in LLaVA.
MMTAG_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant is able to understand the "
    "visual content that the user provides, and assist the user with a variety of tasks using natural language.The "
    "visual content will be provided with the following format: <Image>visual content</Image>."
)
VISION_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
LLAMA_2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe.  "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information."
)
MPT_SYSTEM = (
    "A conversation between a user and an LLM-based AI assistant. The assistant gives helpful and honest answers."
)
ORCA_SYSTEM = (
    "You are MistralOrca, a large language model trained by Alignment Lab AI. Write out your reasoning step-by-step "
    "to be sure you get the right answers!"
)


class Segment(NamedTuple):
    """A piece of the rendered conversation. supervised: its tokens are learned with `weight`; weight 0 also masks
    tokens that are otherwise supervised everywhere. thought_left_out: the template omits the answer's thought."""

    text: str
    supervised: bool = False
    is_answer: bool = False
    first_tokens: int = 0  # above 0: only this many of its tokens are supervised
    weight: float = 1.0
    thought_left_out: bool = False


class Span(NamedTuple):
    """A supervised part of a rendered text, from start to end in characters; other fields as in Segment."""

    start: int
    end: int
    first_tokens: int = 0
    weight: float = 1.0
    thought_left_out: bool = False


Writer = Callable[[Sequence[Message], str], list[Segment]]  # takes messages and a system prompt


@dataclass(frozen=True)
class Template:
    """A text format of conversations, with the rules of LLaVA's code for it."""

    write: Writer | None  # None: the tokenizer's own Jinja template
    system: str
    end_markers: tuple[str, ...]  # after an answer
    next_rules: bool = False  # place images in messages by LLaVA-NeXT's rule, not LLaVA-1.5's
    whole: bool = False  # tokenized as one text, with <image> as a token and without added first tokens
    alternates: bool = True  # questions and answers must alternate
    drops_opening_answer: bool = True
    learned: tuple[str, ...] = ()  # tokens that are supervised everywhere
    image: str = IMAGE_TOKEN  # text in place of an image

    def image_text(self, mm_use_im_start_end: bool) -> str:
        """Return the text for an image, with one IMAGE_TOKEN in it."""
        mark = f"{IM_START_TOKEN}{IMAGE_TOKEN}{IM_END_TOKEN}" if mm_use_im_start_end else IMAGE_TOKEN
        return self.image.replace(IMAGE_TOKEN, mark)


def resolve_template(name: str) -> str:
    """Return the key of TEMPLATES for a value of --version. Raises ConfigError with a list of the supported ones."""
    key = ALIASES.get(name, name)
    if key not in TEMPLATES:
        known, aliases = ", ".join(TEMPLATES), ", ".join(f"{alias} ({key})" for alias, key in ALIASES.items())
        raise ConfigError(f"--version {name} is not known: give one of {known}; LLaVA's names for them: {aliases}")
    return key


def prepare(messages: Sequence[Message], template: str, mm_use_im_start_end: bool = False) -> tuple[list[Message], str]:
    """Return the messages to write, with images at their final positions, and the system prompt.

    Raises DataError if the messages don't fit the template.
    Source: LLaVA's preprocess_multimodal and the first lines of its preprocess_*.
    """
    rules = TEMPLATES[template]
    system = rules.system
    messages = list(messages)
    if any(message.keeps_spaces for message in messages):
        from llava_ds.data.special_tokens import in_lines

        messages = [replace(m, text=in_lines(m.text), keeps_spaces=False) if m.keeps_spaces else m for m in messages]
    if messages and messages[0].role == "system":
        if template == "plain":
            raise DataError("the plain template has no system message")
        system = messages.pop(0).text
        if IMAGE_TOKEN in system:
            raise DataError(f"the system message has an {IMAGE_TOKEN} mark")
    if rules.drops_opening_answer and template != "plain" and messages and messages[0].role == "gpt":
        if IMAGE_TOKEN in messages[0].text:
            raise DataError(f"the first turn is an answer and is left out, but it has an {IMAGE_TOKEN} mark")
        messages = messages[1:]
    if not any(message.role == "human" for message in messages):
        raise DataError("the conversation has no question")
    for i, message in enumerate(messages):
        expected = (("human", "gpt")[i % 2],) if rules.alternates else ("human", "gpt")
        if message.role == "tool" and rules.write is None:
            continue
        if message.role not in expected and template != "plain":
            why = ": questions and answers alternate" if rules.alternates else ""
            raise DataError(f"turn {i} is from {message.role!r}, expected {' or '.join(map(repr, expected))}{why}")
    place = _image_first_next if rules.next_rules else image_first
    mark = rules.image_text(mm_use_im_start_end)
    placed = []
    for message in messages:
        if IMAGE_TOKEN in message.text:
            message = message.with_text(place(message.text).replace(IMAGE_TOKEN, mark))
        placed.append(message)
    return placed, system


def render(messages: Sequence[Message], template: str, mm_use_im_start_end: bool = False) -> list[Segment]:
    """Render a conversation in a template of TEMPLATES. The segments' texts are joined before tokenization.

    For "chat_template", use chat_template.render_own, because it needs a tokenizer. Raises DataError if the messages
    don't fit the template, KeyError for an unknown template.
    """
    placed, system = prepare(messages, template, mm_use_im_start_end)
    return TEMPLATES[template].write(placed, system)


def render_prompt(messages: Sequence[Message], template: str, mm_use_im_start_end: bool = False) -> str:
    """Render the text up to the start of the next answer. messages end with a question."""
    answered = [*messages, Message("gpt", _ANSWER)]
    text = "".join(segment.text for segment in render(answered, template, mm_use_im_start_end))
    return text[: text.rindex(_ANSWER)].removesuffix(" ")


def image_first(text: str) -> str:
    """Move the only image of a message to its beginning, on a separate line.

    Several images in one message stay in place, as in LLaVA-NeXT. LLaVA-1.5 only has one image per record. Source:
    LLaVA-1.5's preprocess_multimodal.
    """
    if text.count(IMAGE_TOKEN) != 1:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()


def _image_first_next(text: str) -> str:
    """Like image_first, but leaves messages that begin with an image unchanged. Source: LLaVA-NeXT."""
    return text if text.startswith(IMAGE_TOKEN) else image_first(text)


def _plain(messages: Sequence[Message], system: str) -> list[Segment]:
    """Write the image, the caption and a newline; the question is ignored. Source: LLaVA's preprocess_plain."""
    if [m.role for m in messages] != ["human", "gpt"] or messages[0].text.count(IMAGE_TOKEN) != 1:
        raise DataError(
            "the plain template takes one question with one <image> and one answer (a caption), found "
            + ", ".join(f"{m.role} with {m.text.count(IMAGE_TOKEN)} <image>" for m in messages)
        )
    return [Segment(IMAGE_TOKEN), Segment(messages[1].text + "\n", True, True, weight=messages[1].weight)]


def _v0(messages: Sequence[Message], system: str) -> list[Segment]:
    """Write with "###" separators. Source: LLaVA's _add_speaker_and_signal and _mask_targets.

    The first two tokens of every question are supervised: they end the previous answer, and have its weight.
    """
    segments = [Segment(f"{system}\n\n")]
    before = 1.0
    for message in messages:
        if message.role == "human":
            segments.append(Segment(f"### Human: {message.text}\n", True, first_tokens=2, weight=before))
        else:
            segments.append(Segment(f"### Assistant: {message.text}\n", True, True, weight=message.weight))
        before = message.weight
    return [*segments, Segment("### ", True, True, weight=before)]


def _two_separators(end: str) -> Writer:
    """Write turns with two separators. The space before an answer is learned with it. Source: LLaVA's
    SeparatorStyle.TWO and preprocess_v1."""

    def write(messages: Sequence[Message], system: str) -> list[Segment]:
        segments = [Segment(f"{system} ")]
        for message in messages:
            name = "USER" if message.role == "human" else "ASSISTANT"
            if not message.text:  # an empty message has no space and no end marker
                segments.append(Segment(f"{name}:"))
            elif message.role == "human":
                segments.append(Segment(f"{name}: {message.text} "))
            else:
                segments += [Segment(f"{name}:"), Segment(f" {message.text}{end}", True, True, weight=message.weight)]
        return segments

    return write


def _llama_2(separator: str) -> Writer:
    """Write turns with [INST]. The spaces around an answer are learned with it. Source: LLaVA's SeparatorStyle.LLAMA_2
    and preprocess_llama_2."""

    def write(messages: Sequence[Message], system: str) -> list[Segment]:
        if not messages[0].text:
            raise DataError("the first question has no text: this template can't write it")
        segments = []
        for i, message in enumerate(messages):
            if not message.text:
                continue
            if message.role == "gpt":
                segments.append(Segment(f" {message.text} </s>", True, True, weight=message.weight))
                continue
            text = f"<<SYS>>\n{system}\n<</SYS>>\n\n{message.text}" if i == 0 and system else message.text
            segments.append(Segment(f"{separator if i else ''}[INST] {text} [/INST]"))
        return segments

    return write


def _turns(user: str, assistant: str, end: str, system: str = "{}") -> Writer:
    """Write turns with headers. An empty message has no end marker. Source: LLaVA's SeparatorStyle.MPT and GEMMA."""

    def write(messages: Sequence[Message], system_text: str) -> list[Segment]:
        segments = [Segment(system.format(system_text) + end)] if system_text else []
        for message in messages:
            if message.role == "human":
                segments.append(Segment(user + message.text + end if message.text else user))
            else:
                segments.append(Segment(assistant))
                if message.text:
                    segments.append(Segment(message.text + end, True, True, weight=message.weight))
        return segments

    return write


def _gemma(messages: Sequence[Message], system: str) -> list[Segment]:
    """Write Gemma's turns. Source: LLaVA-NeXT's SeparatorStyle.GEMMA. Gemma has no system role: the system prompt opens
    the first question."""
    if system:
        messages = [Message("human", f"{system}\n\n{messages[0].text}"), *messages[1:]]
    return _turns("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n")(messages, "")


def _chatml(messages: Sequence[Message], system: str) -> list[Segment]:
    """Write ChatML. The assistant's header is supervised with its answer. Source: LLaVA-NeXT's preprocess_qwen."""
    segments = [Segment(f"<|im_start|>system\n{system}<|im_end|>\n")]
    for message in messages:
        name, answers = ("user", False) if message.role == "human" else ("assistant", True)
        text = f"<|im_start|>{name}\n{message.text}<|im_end|>\n"
        segments.append(Segment(text, answers, answers, weight=message.weight))
    return segments


def _llama_3(messages: Sequence[Message], system: str) -> list[Segment]:
    """Write Llama 3's turns, with outer spaces stripped. Source: LLaVA-NeXT's preprocess_llama3 with Meta's chat
    template."""

    def turn(name: str, text: str) -> str:
        return f"<|start_header_id|>{name}<|end_header_id|>\n\n{text.strip()}<|eot_id|>"

    segments = [Segment("<|begin_of_text|>" + turn("system", system))]
    for message in messages:
        name, answers = ("user", False) if message.role == "human" else ("assistant", True)
        segments.append(Segment(turn(name, message.text), answers, answers, weight=message.weight))
    return segments


_ANSWER = "\ue000"  # placeholder of an answer, to find its beginning
_mpt = _turns("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "<|im_start|>system\n{}")
_zephyr = _turns("<|user|>\n", "<|assistant|>\n", "</s>", "<|system|>\n{}")
_MMTAG = f"<Image>{IMAGE_TOKEN}</Image>"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_LLAMA_3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

TEMPLATES: dict[str, Template] = {
    "plain": Template(_plain, "", ("\n",)),
    "llava_v0": Template(_v0, V0_SYSTEM, ("###",), alternates=False, drops_opening_answer=False),
    "v0_mmtag": Template(_v0, MMTAG_SYSTEM, ("###",), alternates=False, drops_opening_answer=False, image=_MMTAG),
    "v1": Template(_two_separators("</s>"), V1_SYSTEM, ("</s>",)),
    "llava_v1": Template(_two_separators("</s>"), V0_SYSTEM, ("</s>",)),
    "v1_mmtag": Template(_two_separators("</s>"), MMTAG_SYSTEM, ("</s>",), image=_MMTAG),
    "llama_2": Template(_llama_2("<s>"), LLAMA_2_SYSTEM, ("</s>",)),
    "llava_llama_2": Template(_llama_2("<s>"), VISION_SYSTEM, ("</s>",)),
    "mistral_instruct": Template(_llama_2(""), "", ("</s>",)),
    "mistral_orca": Template(_mpt, ORCA_SYSTEM, ("<|im_end|>",), next_rules=True),
    "mistral_zephyr": Template(_zephyr, "You are a helpful AI assistant.", ("</s>",), next_rules=True),
    "mpt": Template(_mpt, MPT_SYSTEM, ("<|im_end|>",)),
    "chatml_direct": Template(_mpt, "Answer the questions.", ("<|im_end|>",)),
    "chatml": Template(
        _chatml,
        "You are a helpful assistant.",
        ("<|im_end|>",),
        next_rules=True,
        whole=True,
        alternates=False,
        learned=_CHATML_TOKENS,
    ),
    "llama_3": Template(
        _llama_3, VISION_SYSTEM, ("<|eot_id|>",), next_rules=True, whole=True, alternates=False, learned=_LLAMA_3_TOKENS
    ),
    "gemma": Template(_gemma, "", ("<end_of_turn>",), next_rules=True),
    "phi": Template(_two_separators("<|endoftext|>"), V1_SYSTEM, ("<|endoftext|>",)),
    "chat_template": Template(None, "", (), next_rules=True, whole=True, drops_opening_answer=False, alternates=False),
    # The template of a model's own processor, with images at their marks.
    "processor": Template(None, "", (), whole=True, drops_opening_answer=False, alternates=False),
}

# LLaVA's and LLaVA-NeXT's other names for templates with the same training text. For v0 and v0.5 their train() uses the
# default conversation, Vicuna's.
ALIASES: dict[str, str] = {
    "v0": "v1",
    "v0.5": "v1",
    "default": "llava_v0",
    "v0_plain": "plain",
    "vicuna_v1": "v1",
    "llava_mistral_instruct": "mistral_instruct",
    "mistral_direct": "chatml_direct",
    "llava_llama_3": "llama_3",
    "qwen_1_5": "chatml",
    "qwen_2": "chatml",
    "qwen_2_5": "chatml",
    "qwen_3": "chatml",
    "gemma_instruct": "gemma",
}
