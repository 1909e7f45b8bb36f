"""Conversations as text: what LLaVA's templates write, in segments that say which part is supervised."""

from dataclasses import dataclass

from llava_ds.constants import IMAGE_TOKEN, DataError

V1_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Message:
    """One turn: role is "human" or "gpt", as LLaVA's files spell them."""

    role: str
    text: str


@dataclass(frozen=True)
class Segment:
    """A piece of the rendered conversation, and whether the model learns to write it."""

    text: str
    supervised: bool


def render(messages: list[Message], template: str) -> list[Segment]:
    """The whole conversation in a template; the segments' texts joined are what is tokenized.

    Raises DataError when the messages don't fit the template, KeyError for an unknown template.
    """
    return TEMPLATES[template](messages)


def render_prompt(messages: list[Message], template: str) -> str:
    """The text up to where the model's next answer begins; messages end with a question."""
    segments = render([*messages, Message("gpt", "")], template)
    return "".join(segment.text for segment in (segments[:-1] if segments[-1].supervised else segments))


def _plain(messages: list[Message]) -> list[Segment]:
    """Source: LLaVA's preprocess_plain: whatever was asked, the picture is followed by the caption and a newline."""
    if [m.role for m in messages] != ["human", "gpt"] or messages[0].text.count(IMAGE_TOKEN) != 1:
        raise DataError(
            "the plain template takes one question with one <image> and one answer (a caption), found "
            + ", ".join(f"{m.role} with {m.text.count(IMAGE_TOKEN)} <image>" for m in messages)
        )
    return [Segment(IMAGE_TOKEN, False), Segment(messages[1].text + "\n", True)]


def _v1(messages: list[Message]) -> list[Segment]:
    """Source: LLaVA's conv_vicuna_v1 and preprocess_v1."""
    if messages and messages[0].role != "human":
        if IMAGE_TOKEN in messages[0].text:
            raise DataError("the first turn is an answer, which is left out, but it holds an <image> mark")
        messages = messages[1:]
    if not messages:
        raise DataError("there is no question in the conversation")
    segments = [Segment(V1_SYSTEM + " ", False)]
    for i, message in enumerate(messages):
        expected = ("human", "gpt")[i % 2]
        if message.role != expected:
            raise DataError(
                f"turn {i} is from {message.role!r}, expected {expected!r}: questions and answers alternate"
            )
        name, text = ("USER", "ASSISTANT")[i % 2], image_first(message.text)
        if not text:  # LLaVA writes neither space nor end marker behind a role that says nothing
            segments.append(Segment(f"{name}:", False))
        elif expected == "human":
            segments.append(Segment(f"{name}: {text} ", False))
        else:
            segments += [Segment(f"{name}: ", False), Segment(text + "</s>", True)]
    return segments


def image_first(text: str) -> str:
    """A message whose only picture stands at its beginning, on a line of its own.

    Several pictures in one message stay where they are. Source: LLaVA's preprocess_multimodal.
    """
    if text.count(IMAGE_TOKEN) != 1:
        return text
    return f"{IMAGE_TOKEN}\n{text.replace(IMAGE_TOKEN, '').strip()}".strip()


TEMPLATES = {"plain": _plain, "v1": _v1}

# The same for transformers' apply_chat_template, where a message's content is a text or a list of parts.
_V1_CHAT_TEMPLATE = (
    "{{ '" + V1_SYSTEM.replace("'", "\\'") + " ' }}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}{% else %}"
    "{% set parts = namespace(images='', text='') %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set parts.images = parts.images + '<image>\\n' %}"
    "{% elif part['type'] == 'text' %}{% set parts.text = parts.text + part['text'] %}{% endif %}"
    "{% endfor %}{% set text = parts.images + parts.text %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' + text + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + text + '</s>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CHAT_TEMPLATES = {"v1": _V1_CHAT_TEMPLATE}
