"""Messages in parts: the ids of ready models are those of their processors, spaces included, in training and asked."""

import base64
import itertools
import json

import numpy as np
import pytest
from PIL import Image
from ready_models import FAMILIES, open_processor, write_ready
from toys import encoding_options
from transformers import AutoConfig

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.encode import encoder_of
from llava_ds.data.encoded_rows import SizedMedia, layout_of
from llava_ds.data.sources import SourceOptions, open_sources, to_sample
from llava_ds.data.special_tokens import PART_END, in_lines, join_parts, split_parts
from llava_ds.data.templates import render
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import without_image
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.chat_completions import read_completion
from llava_ds.extensions.infer.generate import Sampling
from llava_ds.extensions.ready.family import media_ids
from llava_ds.model.open.model_plan import read_parts

IMAGE = {"type": "image"}
ANSWER = [{"type": "text", "text": "A cat."}]


def text(words: str) -> dict:
    return {"type": "text", "text": words}


# Conversations as turns of the user and the assistant.
TALKS = {
    "an image and a question": [[IMAGE, text("What is it?")], ANSWER],
    "images inside a sentence": [[text("Compare "), IMAGE, text(" with "), IMAGE, text(".")], ANSWER],
    "a line break behind an image": [[IMAGE, text("\nWhat is it?")], ANSWER],
    "a line break before an image": [[text("Who wrote this book?\n"), IMAGE], ANSWER],
    "two texts before an image": [[text("First line."), text("Second line."), IMAGE], ANSWER],
    "two texts behind an image": [[IMAGE, text("a "), text(" b")], ANSWER],
    "text alone with spaces around": [[text("  Hello  ")], ANSWER],
    "an empty text": [[IMAGE, text("")], ANSWER],
    "an image alone": [[IMAGE], ANSWER],
    "captions of images": [[text("Image 1:\n"), IMAGE, text("\nImage 2:\n"), IMAGE], ANSWER],
    "an empty text before an image": [[text(""), IMAGE, text("What?")], ANSWER],
    "texts alone": [[text(" one "), text(""), text("two\n"), text("\n three")], ANSWER],
    "images side by side": [[text("\n"), IMAGE, IMAGE, text(" "), IMAGE, text("\n\n")], ANSWER],
    "other alphabets": [[text("これは\u3000"), IMAGE, text("\u00a0日本。 "), text("🐈\n")], ANSWER],
    "spaces of tabs": [[text("\t"), IMAGE, text("\t\tWhat\n\n\nis it?  ")], ANSWER],
    "an image in a later turn": [[text("Hello \n")], ANSWER, [text("And \n"), IMAGE, text(" this?")], ANSWER],
    "an answer in two texts": [[IMAGE, text(" What?")], [text("A cat,"), text("black.")], [text("And?\n")], ANSWER],
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Three images of different shapes."""
    folder = tmp_path_factory.mktemp("images")
    for i, size in enumerate([(64, 48), (40, 70), (97, 33)]):
        pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def ready(request, tmp_path_factory):
    """A family's folder, its processor, encoder and image options."""
    folder = tmp_path_factory.mktemp(request.param)
    write_ready(folder, request.param)
    parts = read_parts(ModelArguments(model_name_or_path=str(folder)))
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    options = parts.tower.image_options(args)
    encoder = encoder_of(parts.open_tokenizer(), encoding_options(template="processor", max_length=10**6), options)
    return folder, open_processor(folder, request.param), encoder, options


def opened(folder, records: list[dict], **options):
    """The source of some records, with the images of a folder."""
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    (source,) = open_sources(str(path), SourceOptions(image_folder=str(folder), cache_dir=str(folder / "c"), **options))
    return source


def sample_of(folder, record: dict, **options):
    return to_sample(json.dumps(record), opened(folder, [record], **options), 0)


def record_of(turns: list[list[dict]]) -> dict:
    """The record whose images are the first ones of the folder, in order."""
    number = sum(part["type"] == "image" for turn in turns for part in turn)
    return {"images": [f"{i}.png" for i in range(number)], "messages": messages_of(turns)}


def messages_of(turns: list[list[dict]]) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def encoded(sample, encoder, options, config, prompt: bool = False) -> list[int]:
    """Ids of a sample, or of its questions and what comes before the last answer, with those of image tokens."""
    layouts = [layout_of(SizedMedia.of(one, options), len(sample.media), options) for one in sample.media]
    marks = [layout.mark for layout in layouts]
    if prompt:
        ids = np.array(encoder.prompt_ids(sample.messages[:-1], marks))
    else:
        (found,) = encoder.encode_batch([(sample.messages, marks)])
        assert not isinstance(found, DataError), found
        ids = found.input_ids.copy()
    ids[ids == IMAGE_TOKEN_INDEX] = media_ids(config, layouts)
    return ids.tolist()


@pytest.mark.parametrize("name", TALKS)
def test_ids_are_the_processors_spaces_included(ready, images, name):
    """Of the record, of its prompt, and of the prompt that the endpoint makes of the same messages."""
    folder, processor, encoder, options = ready
    turns, config, left = TALKS[name], AutoConfig.from_pretrained(folder), iter(range(3))
    shown = [
        [{**part, "image": Image.open(images / f"{next(left)}.png")} if part == IMAGE else part for part in turn]
        for turn in turns
    ]
    chat = messages_of(shown)
    settings = {"tokenize": True, "return_dict": True}
    sample = sample_of(images, record_of(turns))
    expected = processor.apply_chat_template(chat, **settings)["input_ids"][0]
    assert encoded(sample, encoder, options, config) == list(expected)
    expected = processor.apply_chat_template(chat[:-1], add_generation_prompt=True, **settings)["input_ids"][0]
    assert encoded(sample, encoder, options, config, prompt=True) == list(expected)
    asked = read_completion(request_of(turns[:-1], images), "m", Sampling(), images).question.conversation
    assert asked.messages == sample.messages[:-1]


@pytest.mark.parametrize("turns", ["together", "each"])
def test_questions_are_asked_as_they_were_trained(images, turns):
    """Of a file to evaluate on: the parts of its questions, and the settings of its images."""
    record = record_of([[text("Image 1:\n"), IMAGE, text("What?")], ANSWER, [text("And "), text("here?")], ANSWER])
    record["messages"][0]["content"][1] = {**IMAGE, "max_pixels": 4096}
    path = images / "questions.json"
    path.write_text(json.dumps([record]))
    sample = sample_of(images, record)
    given = Given(str(path), image_folder=str(images), turns=turns, cache_dir=str(images / "c"))
    first, second = read_questions("llava", given, None)
    assert first.prompt.messages == sample.messages[:1] and first.asked == "Image 1:\nWhat?"
    assert first.prompt.images == second.prompt.images == sample.media and sample.media[0].settings
    assert second.asked == "And here?" and second.reference == "A cat."
    if turns == "together":
        assert second.prompt.messages == sample.messages[:3]
    else:
        [asked] = second.prompt.messages
        assert split_parts(asked.text) == [None, "And ", "here?"] and asked.keeps_spaces
    assert without_image(second).prompt.messages[-1].text == "And here?"


def test_images_without_a_part_are_put_before_the_question_as_parts(images):
    """As TRL puts them; the spaces of its text stay."""
    record = {**record_of([[text(" What?\n")], ANSWER]), "images": ["0.png", "1.png"]}
    [question, _] = sample_of(images, record).messages
    assert split_parts(question.text) == [None, None, " What?\n"] and question.keeps_spaces


def request_of(turns: list[list[dict]], images) -> bytes:
    """The same messages as a request of OpenAI's."""
    left = iter(range(3))

    def part_of(part: dict) -> dict:
        if part != IMAGE:
            return part
        data = base64.b64encode((images / f"{next(left)}.png").read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    messages = [{**one, "content": [part_of(part) for part in one["content"]]} for one in messages_of(turns)]
    return json.dumps({"model": "m", "messages": messages}).encode()


@pytest.mark.parametrize("version", ["v1", "chatml_direct", "gemma"])
@pytest.mark.parametrize("name", TALKS)
def test_llavas_templates_write_images_on_lines_of_their_own(images, name, version):
    """As in the same record in LLaVA's form: its models know no other."""
    record = record_of(TALKS[name])
    strings = [{**message, "content": in_llavas_form(message["content"])} for message in record["messages"]]
    samples = [sample_of(images, each) for each in (record, {**record, "messages": strings})]
    one, other = (render(sample.messages, version) for sample in samples)
    assert one == other and samples[0].media == samples[1].media


def in_llavas_form(parts: list[dict]) -> str:
    runs = [("<image>" if one == IMAGE else one["text"], one == IMAGE) for one in parts]
    lines = []
    for is_image, group in itertools.groupby(runs, key=lambda run: run[1]):
        found = [words for words, _ in group]
        lines += found if is_image else ["".join(found)]
    return "\n".join(line for line in lines if line)


@pytest.mark.parametrize(
    "parts", [[None], ["", None], [None, "", "a"], ["a", "b", None, None, "", "", None, " "], ["", "x"], ["\n", "x"]]
)
def test_parts_are_found_again_in_their_text(parts):
    joined, keeps_spaces = join_parts(parts)
    assert split_parts(joined) == parts and keeps_spaces
    assert in_lines(joined).replace("\n", "") == "".join("<image>" if p is None else p for p in parts).replace("\n", "")


def test_one_text_needs_no_sign_of_parts():
    assert join_parts(["a ", None, "\nb"]) == ("a <image>\nb", True) and PART_END in join_parts(["a", "b"])[0]
    assert join_parts(["a b"]) == ("a b", False) and join_parts([]) == join_parts(["", ""]) == ("", False)
    assert join_parts([" a"]) == (" a", True)


def test_a_part_can_not_bring_a_noncharacter(images):
    with pytest.raises(DataError, match=r"contains U\+FDD8, not a character"):
        sample_of(images, record_of([[text(f"a{PART_END}b")], ANSWER]))
