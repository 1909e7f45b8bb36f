"""A backslash before <image>, <video>, <bbox> or <ref-object> makes it a word; two are a backslash before a mark."""

import json

import pytest
import toys
from PIL import Image

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.dataset import ALONE, PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources, to_sample
from llava_ds.data.special_tokens import LITERAL_IMAGE, shown_text
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import without_image
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.chat import Conversation
from llava_ds.model.open.model_plan import read_parts

IMAGES = {name: f"{name}.png" for name in "ab"}


@pytest.fixture
def folder(tmp_path):
    for name in IMAGES.values():
        Image.new("RGB", (32, 24), "red").save(tmp_path / name)
    (tmp_path / "a.mp4").touch()
    return tmp_path


def sources_of(folder, record: dict, **options):
    path = folder / "data.json"
    path.write_text(json.dumps([record]))
    given = {"image_folder": str(folder), "video_folder": str(folder), "cache_dir": str(folder / "cache"), **options}
    return open_sources(str(path), SourceOptions(**given))


def sample_of(folder, record: dict, **options):
    return to_sample(json.dumps(record), sources_of(folder, record, **options)[0], 0)


def talk(question: object, answer: str = "A cat.", **fields) -> dict:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **fields}


@pytest.mark.parametrize(
    ("question", "answer", "media", "shown"),
    [  # shown: the question and the answer, with {} for each image
        (r"<image>What is \<image> in HTML?", "A word.", {"image": "a.png"}, ("{}What is <image> in HTML?", "A word.")),
        (r"<image>Which mark?", r"\<image>, of course", {"image": "a.png"}, ("{}Which mark?", "<image>, of course")),
        (r"C:\\<image>", "A path.", {"image": "a.png"}, ("C:\\{}", "A path.")),
        (r"<image>C:\\\<image>", "A word.", {"image": "a.png"}, ("{}C:\\<image>", "A word.")),
        (r"<video> or \<video>?", "The first.", {"video": "a.mp4"}, ("{} or <video>?", "The first.")),
        (
            r"<image> and \<video> in LLaVA's form",
            "Text.",
            {"image": "a.png"},
            (r"{} and \<video> in LLaVA's form", "Text."),
        ),
        (
            r"Is \<bbox> a mark?<image>",
            r"\<ref-object>, too",
            {"image": "a.png"},
            ("Is <bbox> a mark?{}", "<ref-object>, too"),
        ),
        (r"Is \<image> a mark?", "Yes.", {}, ("Is <image> a mark?", "Yes.")),
    ],
)
def test_a_word_is_told_from_a_mark(folder, question, answer, media, shown):
    sample = sample_of(folder, talk(question, answer, **media))
    found = [message.text.replace("<image>", "{}").replace(LITERAL_IMAGE, "<image>") for message in sample.messages]
    assert tuple(found) == shown and len(sample.media) == len(media)


def row_of(folder, record: dict, tokenizer, options=None, template="v1"):
    """The row of a record in a data set."""
    preflight = PreflightOptions(cache_dir=str(folder / "cache"), num_workers=1, on_bad_sample="list")
    encoding = toys.encoding_options(template=template, max_length=4096)
    images = options or toys.image_options(aspect_ratio="pad")
    dataset = open_encoded(sources_of(folder, record), tokenizer, encoding, images, preflight, ALONE)
    return next(dataset.rejections(), None) or dataset.row(0)


def words_of(row: dict, tokenizer) -> str:
    return tokenizer.decode([token for token in row["input_ids"] if token != IMAGE_TOKEN_INDEX])


def test_words_beside_boxes(folder, tokenizer):
    record = talk(r"<image>Where is the <ref-object>? Answer \<bbox>.", r"\\<bbox> \<ref-object>", image="a.png")
    row = row_of(folder, {**record, "objects": {"ref": ["cat"], "bbox": [[1, 2, 30, 20]]}}, tokenizer)
    text = words_of(row, tokenizer)
    assert "Where is the cat? Answer <bbox>." in text and "\\[0." in text and "] <ref-object>" in text


@pytest.mark.parametrize("parts", [False, True])
def test_a_word_has_its_own_letters_ids(folder, tokenizer, parts):
    """Of LLaVA's template, and the number of images is that of the marks."""
    question = r"<image>The tag \<image>?"
    content = [{"type": "image"}, {"type": "text", "text": r"The tag \<image>?"}]
    record = talk(question, image="a.png")
    if parts:
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
        record = {"messages": turns, "images": ["a.png"]}
    row = row_of(folder, record, tokenizer)
    assert "The tag <image>?" in words_of(row, tokenizer) and row["num_pictures"] == 1


def test_a_model_whose_image_token_is_the_word_refuses_it(folder):
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(folder / "model", "smolvlm")
    parts = read_parts(ModelArguments(model_name_or_path=str(folder / "model")))
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    found = row_of(
        folder,
        talk(r"<image>What is \<image>?", image="a.png"),
        parts.open_tokenizer(),
        parts.tower.image_options(args),
        "processor",
    )
    assert "its text must not spell that token" in found["reason"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (talk("<image> and <image>", image="a.png"), r"its text has 2 <image> marks; \<image> is the word alone"),
        (talk("<video> and <video>", video=["a.mp4"]), r"2 <image> marks; \<video> or \<image> is the word alone"),
        (talk("The tag <image>"), r"see --on_unmarked_image; \<image> is the word alone"),
        (talk("<image>The tag <bbox>", image="a.png"), r"\<bbox> is the word alone"),
        (
            talk("<image><bbox>, <bbox>", image="a.png", objects={"bbox": [[1, 2, 3, 4]]}),
            r"has 2 <bbox> marks: make them equal (\<bbox> is the word alone)",
        ),
        ({"image": "a.png", "text": "An <image> tag"}, r"has an <image> mark in its caption (\<image> is the word)"),
        (
            {
                "images": ["a.png"],
                "messages": [
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>What?"}]},
                    {"role": "assistant", "content": "A cat."},
                ],
            },
            r"its text has 2 <image> marks; \<image> is the word alone",
        ),
    ],
)
def test_a_wrong_number_of_marks_names_the_word(folder, record, expected):
    with pytest.raises(DataError) as caught:
        sample_of(folder, record)
    assert expected in str(caught.value)


def test_a_system_message_may_name_the_word(folder):
    for record in (
        talk("Hi", system=r"Never write \<image>."),
        {
            "conversations": [
                {"from": "system", "value": r"Never write \<image>."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "A cat."},
            ]
        },
    ):
        sample = sample_of(folder, record)
        assert shown_text(sample.messages[0].text) == "Never write <image>." and not sample.media
        with pytest.raises(DataError, match=r"in its system message, where images can't be \(\\<image> is the word\)"):
            sample_of(folder, json.loads(json.dumps(record).replace("\\\\<", "<")))


def test_a_caption_may_name_the_word(folder):
    sample = sample_of(folder, {"image": "a.png", "text": r"An \<image> tag"})
    assert shown_text(sample.messages[1].text) == "An <image> tag" and len(sample.media) == 1


def test_a_mark_inside_a_text_part_is_llavas_form(folder):
    """A record whose strings were made lists of one text each is the same record."""
    record = talk("<image>\nWhat is it?", image="a.png")
    parts = [{"type": "text", "text": "<image>\nWhat is it?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]
    one, other = sample_of(folder, record), sample_of(folder, {"messages": turns, "images": ["a.png"]})
    assert one.messages[0] == other.messages[0] and one.media == other.media


def test_questions_and_references_show_the_word(folder):
    record = talk(r"<image>What is \<image>?", r"\<image>", image="a.png")
    path = folder / "data.json"
    path.write_text(json.dumps([record]))
    given = Given(str(path), image_folder=str(folder), cache_dir=str(folder / "cache"))
    [question] = read_questions("llava", given, None)
    assert question.asked == "What is <image>?" and "<image>" in str(question.reference)
    assert without_image(question).prompt.messages[0].text == f"What is {LITERAL_IMAGE}?"


def test_a_chat_takes_the_word_and_saves_it(folder):
    conversation = Conversation().with_question(r"What is \<image>?")
    assert conversation.messages[0].text == f"What is {LITERAL_IMAGE}?"
    assert conversation.record()["conversations"][0]["value"] == r"What is \<image>?"
    with pytest.raises(DataError, match=r"a placeholder for an image.*\\<image> is the word"):
        Conversation().with_question("What is <image>?")
