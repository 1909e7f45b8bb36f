"""Records in the forms of other trainers and of published data sets are the conversation that their authors mean."""

import base64
import functools
import io
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import Sample
from llava_ds.data.sources import Source, SourceOptions, open_sources, parse_columns, to_sample

ASKED, SAID = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A boat."}
TALK = [("human", "<image>\nWhat is it?"), ("gpt", "A boat.")]


def png(width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 3), "red").save(file, "PNG")
    return file.getvalue()


class Data:
    """A folder with images; files written into it are opened with the options of the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("0.png", "1.png"):
            (folder / name).write_bytes(png(4 + int(name[0])))

    def open(self, path: Path, columns: str = "", **options) -> Source:
        named = SourceOptions(
            image_folder=str(self.folder),
            cache_dir=str(self.folder / "cache"),
            columns=parse_columns(columns),
            **options,
        )
        [source] = open_sources(str(path), named)
        return source

    def json(self, *records: object, **options) -> Source:
        path = self.folder / "data.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return self.open(path, **options)

    def parquet(self, *records: dict, **options) -> Source:
        path = self.folder / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
        return self.open(path, **options)

    def csv(self, text: str, name: str = "data.csv", **options) -> Source:
        path = self.folder / name
        path.write_text(text, encoding="utf-8-sig")
        return self.open(path, **options)


@pytest.fixture
def data(tmp_path) -> Data:
    return Data(tmp_path)


def samples(source: Source) -> list[Sample]:
    return [to_sample(record.text, source, record.index) for record in source.read()]


def said(source: Source) -> list[tuple[str, str]]:
    [sample] = samples(source)
    return [(message.role, message.text) for message in sample.messages]


def refused(opening) -> str:
    with pytest.raises(ConfigError) as caught:
        opening()
    return str(caught.value)


def rejected(source: Source, number: int = 0) -> str:
    record = list(source.read())[number]
    with pytest.raises(DataError) as caught:
        to_sample(record.text, source, number)
    return str(caught.value)


# Every form, as one line of JSON, and as a table with the image's bytes

FORMS = {
    "the Cauldron": {"texts": [{"user": "What is it?", "assistant": "A boat.", "source": "VQAv2"}]},
    "FineVision": {"texts": [{"user": "What is it?", "assistant": "A boat."}], "relevance_ratings": [5], "source": "x"},
    "TRL, texts": {"prompt": "What is it?", "completion": "A boat."},
    "TRL, messages": {"prompt": [ASKED], "completion": [SAID]},
    "TRL, messages as JSON text": {"prompt": json.dumps([ASKED]), "completion": json.dumps([SAID])},
    "TRL, parts": {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat is it?"}]}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": "A boat."}]}],
    },
    "alpaca": {"instruction": "What is it?", "input": "", "output": "A boat."},
    "alpaca with a null": {"instruction": "What is it?", "input": None, "output": "A boat."},
    "ms-swift": {"query": "<image>\nWhat is it?", "response": "A boat.", "history": []},
    "question and answer": {"question": "What is it?", "answer": "A boat."},
    "answers": {"question": "What is it?", "answers": ["A ship.", "A boat.", "A boat."]},
    "VQAv2": {
        "question": "What is it?",
        "answers": [{"answer": "A boat.", "answer_confidence": "yes", "answer_id": 1}],
    },
    "SQuAD's": {"question": "What is it?", "answers": {"text": ["A boat.", "A ship."], "answer_start": [0, 9]}},
    "words of two sets": {"prompt": "What is it?", "response": "A boat."},
    "input and output": {"input": "What is it?", "output": "A boat."},
    "JSON text": {
        "conversations": json.dumps(
            [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A boat."}]
        )
    },
    "messages as JSON text": {"messages": json.dumps([ASKED, SAID])},
    "an object of lists": {"messages": {"role": ["user", "assistant"], "content": ["What is it?", "A boat."]}},
    "an object of lists, ShareGPT": {"conversations": {"from": ["human", "gpt"], "value": ["What is it?", "A boat."]}},
    "a list of JSON texts": {"messages": [json.dumps(ASKED), json.dumps(SAID)]},
    "verl": {"prompt": [ASKED], "reward_model": {"style": "rule", "ground_truth": "A boat."}, "ability": "sea"},
    "problems": {"problem": "What is it?", "solution": "A boat."},
    "pairs": {"conversations": [["What is it?", "A boat."]]},
    "named pairs": {"conversation": [{"human": "What is it?", "assistant": "A boat."}]},
}


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_conversation(data, form, kind):
    columns = "conversations=conversation" if form == "named pairs" else ""
    if kind == "json":
        source = data.json({**FORMS[form], "images": ["0.png"]}, columns=columns)
    else:
        source = data.parquet({**FORMS[form], "images": [{"bytes": png(4), "path": None}]}, columns=columns)
    [sample] = samples(source)
    assert [(message.role, message.text) for message in sample.messages] == TALK
    assert len(sample.media) == 1 and all(message.weight == 1 for message in sample.messages)


def test_pairs_of_one_record_are_turns_and_all_images_stand_first(data):
    pairs = [
        {"user": "One?", "assistant": "1"},
        {"user": "Two?", "assistant": "2"},
        {"user": "Three?", "assistant": "3"},
    ]
    [sample] = samples(data.json({"images": ["0.png", "1.png"], "texts": pairs}))
    assert [message.text for message in sample.messages] == [
        *("<image>\n<image>\nOne?", "1", "Two?", "2"),
        *("Three?", "3"),
    ]
    assert len(sample.media) == 2


@pytest.mark.parametrize("choice", ["text", "refuse"])
def test_the_flag_of_unmarked_images_is_for_forms_that_may_have_marks(data, choice):
    """No record of the Cauldron has one, as no caption has."""
    assert said(data.json({**FORMS["the Cauldron"], "images": ["0.png"]}, on_unmarked_image=choice)) == TALK
    source = data.json({**FORMS["question and answer"], "images": ["0.png"]}, on_unmarked_image=choice)
    if choice == "refuse":
        assert "see --on_unmarked_image" in rejected(source)
    else:
        assert samples(source)[0].unmarked == "image left out"


def test_alpaca_with_history_system_and_input(data):
    record = {"instruction": "Add.", "input": "1 + 2", "output": "3", "system": "Count.", "history": [["Hi", "Hello"]]}
    assert said(data.json(record)) == [
        *(("system", "Count."), ("human", "Hi"), ("gpt", "Hello")),
        *(("human", "Add.\n1 + 2"), ("gpt", "3")),
    ]


@pytest.mark.parametrize(
    "history",
    [
        [["Hi", "Hello"]],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"query": "Hi", "response": "Hello"}],
        json.dumps([["Hi", "Hello"]]),
    ],
)
def test_a_history_stands_before_the_question_and_is_learned(data, history):
    [sample] = samples(data.json({"query": "Who?", "response": "Me.", "history": history}))
    assert [message.text for message in sample.messages] == ["Hi", "Hello", "Who?", "Me."]
    assert [message.weight for message in sample.messages] == [1, 1, 1, 1]


def test_answers_inside_a_prompt_of_messages_are_not_learned(data):
    """TRL computes the loss on the completion; a weight that the message has itself counts."""
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, ASKED]
    [sample] = samples(data.json({"prompt": prompt, "completion": [SAID]}))
    assert [message.weight for message in sample.messages if message.role == "gpt"] == [0, 1]
    prompt[1]["weight"] = 1
    [sample] = samples(data.json({"prompt": prompt, "completion": [SAID]}))
    assert [message.weight for message in sample.messages if message.role == "gpt"] == [1, 1]


@pytest.mark.parametrize(
    ("answers", "learned"),
    [
        (["net", "nets", "nets", "net"], "net"),  # of equal counts the first
        (["a", None, "b", "b"], "b"),
        ([3, 3, "2"], "3"),
        ([{"answer": "yes"}, {"answer": "no"}, {"answer": "no"}], "no"),
        ('["dog", "cat", "cat"]', "cat"),  # as a CSV has it
        ("just this", "just this"),
        (7, "7"),
    ],
)
def test_the_most_frequent_answer_is_learned(data, answers, learned):
    assert said(data.json({"question": "What?", "answers": answers}))[1] == ("gpt", learned)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "What?", "answers": []}, "has an empty list under 'answers', expected an answer"),
        ({"question": "What?", "answers": [None]}, "has an empty list under 'answers'"),
        ({"question": "What?", "answers": "['a', 'b']"}, "has a text under 'answers' that is not a JSON list"),
        ({"question": "What?", "answers": {"start": 3}}, "has {'start': 3} under 'answers', expected an answer"),
        ({"question": "What?", "answer": True}, "has True under 'answer', expected text"),
        ({"question": "What?", "answer": " "}, "has ' ' under 'answer', expected an answer"),
        ({"prompt": "What?", "completion": ""}, "has '' under 'completion', expected an answer"),
        ({"question": "What?", "answers": [{"answer": ""}]}, "has '' under 'answers', expected an answer"),
        ({"question": ["a", 3], "answer": "b"}, "has ['a', 3] under 'question', expected text"),
        ({"prompt": "a", "completion": {"x": 1}}, "has {'x': 1} under 'completion', expected text"),
        (
            {"question": "a", "prompt": "b", "answer": "c"},
            "has both 'prompt' and 'question', and either could be the qu",
        ),
        ({"question": "a", "output": "b", "answer": "c"}, "has both 'answer' and 'output', and either could be the an"),
        ({"question": "What?"}, "has no answer under 'completion' or 'response' or 'answer' or 'answers' or "),
        ({"answer": "What?"}, "has no question under 'prompt' or 'query'"),
        (
            {"query": "a", "response": "b", "history": [3]},
            "has 3 as number 0 of 'history', expected an object with a role",
        ),
    ],
)
def test_a_record_without_question_or_answer_says_why(data, record, reason):
    good = {"question": "Who?", "answer": "Me."}
    assert reason in rejected(data.json(good, good, good, record), 3)


def test_a_record_of_texts_that_has_none_says_why(data):
    good = {"texts": [{"user": "Who?", "assistant": "Me."}]}
    source = data.json(
        good, good, {"text": "a"}, {"texts": [{"user": "Who?"}]}, {"texts": "[1"}, {"texts": {"user": ["a"]}}
    )
    assert "has no texts under 'texts'" in rejected(source, 2)
    assert "has an object without 'from' or 'role' as number 0 of 'texts' (its keys: 'user')" in rejected(source, 3)
    assert "has a text under 'texts' that is not JSON" in rejected(source, 4)
    assert "has an object without 'from' or 'role' as number 0 of 'texts'" in rejected(source, 5)


# What is asked of the user


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"conversations": "Who? Me."}, "the first has a text under 'conversations' that is not JSON: Expecting value"),
        (
            {"conversations": "[{'from': 'human'}]"},
            "has a text under 'conversations' that is not JSON: Expecting property",
        ),
        (
            {"messages": [{"content": "a"}]},
            "has an object without 'from' or 'role' as number 0 of 'messages' (its keys: 'co",
        ),
        (
            {"messages": [{"role": None, "content": "a"}]},
            "has an object whose 'role' is None as number 0 of 'messages'",
        ),
        (
            {"messages": {"role": "user", "content": "a"}},
            "has one object under 'messages' (with 'role', 'content'), expected",
        ),
        (
            {"messages": {"role": ["user"], "content": []}},
            "lists of different lengths in 'messages': 1 under 'role', 0 un",
        ),
        (
            {"conversations": ["Who?", "Me."]},
            "has 'Who?' as number 0 of 'conversations', expected an object with a role",
        ),
        ({"conversations": 7}, "has 7 under 'conversations', expected a list of turns"),
        ({"conversations": []}, "has an empty list under 'conversations'"),
        ({"messages": '"a"'}, "has 'a' under 'messages', expected a list of turns"),
        ({"texts": ["a", "b"]}, "has 'a' as number 0 of 'texts', expected an object with a role"),
        (
            {"image": "0.png", "question": "Who?"},
            "has a question under 'question' and no answer: name it with --data_columns",
        ),
        (
            {"image": "0.png", "label": "x", "response": "a"},
            "has an answer under 'response' and no question: name it with",
        ),
        ({"text": "A long story."}, "has a text under 'text' and no image under 'image' or 'images', as a caption has"),
        ({"image": "0.png", "text": ["a"]}, "has ['a'] under 'text', expected a caption"),
        ({"image": "0.png", "label": 3}, "has an image, but its text is under no known key"),
        ({"url": "a", "n": 3}, "none of their keys is known (keys found: 'url', 'n')"),
        (
            {"Image": "0.png", "Question": "Who?", "Answer": "Me."},
            "keys that are not read: give --data_columns image=Image,question=Question,answer=Answer, if they are",
        ),
        ({"conversation": [ASKED, SAID], "n": [1]}, "give --data_columns conversations=conversation, if"),
        ({"image": "0.png", "dialog": json.dumps([ASKED, SAID])}, "give --data_columns conversations=dialog, if"),
        ({"image": "0.png", "chat": {"from": ["human"], "value": ["Who?"]}}, "give --data_columns conversations=chat"),
    ],
)
def test_an_unknown_layout_is_refused_with_what_is_wrong_with_its_value(data, record, says):
    message = refused(lambda: data.json(record))
    assert f"its records are of no known format: {says if says.startswith(('the', 'no')) else ''}" in message
    assert says in message


def test_names_of_a_table_that_are_nearly_known_are_suggested(data):
    """Whose cells are not read yet."""
    talk = {"images": [{"bytes": png(4), "path": None}], "conversation": [ASKED, SAID]}
    message = refused(lambda: data.parquet(talk))
    assert "give --data_columns conversations=conversation, if they are those fields" in message
    assert said(data.parquet(talk, columns="conversations=conversation")) == TALK
    assert "give --data_columns image=Image,text=Caption, if" in refused(
        lambda: data.parquet({"Image": "", "Caption": ""})
    )


def test_a_question_beside_a_caption_is_not_dropped(data):
    """The caption might be its answer, or a caption."""
    record = {"image": "0.png", "question": "What is it?", "caption": "A boat."}
    message = refused(lambda: data.json(record))
    assert "name it with --data_columns answer=caption, or learn 'caption' alone with --data_format caption" in message
    assert said(data.json(record, columns="answer=caption")) == TALK
    assert said(data.json(record, data_format="caption")) == [("human", "<image>"), ("gpt", "A boat.")]


@pytest.mark.parametrize(
    ("record", "names", "named", "question", "answer"),
    [
        (
            {"question": "What?", "answer": "a", "response": "b"},
            "'response' and 'answer'",
            "answer=answer",
            "What?",
            "a",
        ),
        (
            {"question": "What?", "answer": "a", "answers": ["c"]},
            "'answer' and 'answers'",
            "answer=answers",
            "What?",
            "c",
        ),
        (
            {"question": "What?", "prompt": "Why?", "answer": "a"},
            "'prompt' and 'question'",
            "prompt=prompt",
            "Why?",
            "a",
        ),
        (
            {"instruction": "Do.", "input": "x", "output": "a", "response": "b"},
            *("'response' and 'output'", "output=output", "Do.\nx", "a"),
        ),
    ],
)
def test_two_fields_that_could_be_the_same_are_asked_about(data, record, names, named, question, answer):
    message = refused(lambda: data.json(record))
    assert f"its records have {names}, and either could be the" in message and "with --data_columns" in message
    assert said(data.json(record, columns=named)) == [("human", question), ("gpt", answer)]


def test_the_more_complete_form_counts(data):
    talk = [{"from": "human", "value": "Talk?"}, {"from": "gpt", "value": "Yes."}]
    rest = {"image": "0.png", "text": "OCR of it", "question": "Q?", "answer": "A."}
    assert said(data.json({**rest, "conversations": talk}))[1][1] == "Yes."
    assert said(data.json({**rest, "texts": [{"user": "T?", "assistant": "T."}], "caption": "c"}))[1][1] == "T."
    source = data.json(rest)
    assert said(source)[1][1] == "A." and "questions and answers in JSONL; image from 'image', " in source.describe()


def test_records_of_several_forms_in_one_file_are_each_read_in_their_own(data):
    talk = {"messages": [ASKED, SAID]}
    records = [FORMS["alpaca"], talk, FORMS["the Cauldron"], FORMS["ms-swift"], talk | {"question": "Q", "answer": "A"}]
    source = data.json(*({**record, "images": ["0.png"]} for record in records))
    found = [[(message.role, message.text) for message in sample.messages] for sample in samples(source)]
    assert found == [TALK] * 5
    assert "conversation from 'messages'" in source.describe() and "texts from 'texts'" in source.describe()
    source = data.json(*records, data_format="messages")
    assert "has no list under 'conversations' or 'messages'" in rejected(source)


@pytest.mark.parametrize("key", ["choices", "options"])
def test_answers_that_are_numbers_of_choices_are_refused(data, key):
    rows = [{"question": "Which?", key: ["a", "b"], "answer": answer} for answer in (1, 0)]
    message = refused(lambda: data.json(*rows))
    assert (
        f"its answers under 'answer', such as 1, are numbers or letters of {key!r}, and the question does not "
        "show these" in message
    )
    assert f"of {key!r}, and" in refused(lambda: data.parquet(*rows))
    letters = [{"question": "Which?", key: ["a", "b"], "answer": answer} for answer in ("B", "(A)")]
    assert "its answers under 'answer', such as 'B', are" in refused(lambda: data.json(*letters))
    assert [sample.messages[1].text for sample in samples(data.json(*rows, columns="answer=answer"))] == ["1", "0"]
    assert len(samples(data.json(*({**row, "answer": "a dog"} for row in rows)))) == 2


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A boat."}]},
        {"texts": [{"user": "What is it?", "assistant": "A boat."}]},
        {"prompt": "What is it?", "chosen": "A boat.", "rejected": "A cat."},
    ],
)
def test_no_form_is_learned_blindly(data, record, kind):
    """Of conversations without marks nothing else would tell that images are missing."""
    pairs = "chosen" in record
    message = refused(lambda: getattr(data, kind)({**record, "image_path": "0.png"}, are_preferences=pairs))
    assert "probably one under 'image_path': name it with --data_columns image=image_path" in message
    source = getattr(data, kind)({**record, "image_path": "0.png"}, are_preferences=pairs, columns="image=image_path")
    assert samples(source)[0].messages[0].text == "<image>\nWhat is it?"


@pytest.mark.parametrize("is_saved", [False, True])
def test_columns_of_tables_that_name_images_are_asked_about(data, is_saved):
    """GQA has its images in another table; a column of paths is as easily missed as one of bytes."""

    def opened(more: dict) -> Source:
        row = {"question": "What is it?", "answer": "A boat.", **more}
        if not is_saved:
            return data.parquet(row)
        datasets.Dataset.from_list([row]).save_to_disk(str(data.folder / "saved"))
        return data.open(data.folder / "saved")

    for key, value in (
        ("image_path", "0.png"),
        ("imageId", "2370799"),
        ("image_id", 7),
        ("frames", ["0.png", "1.png"]),
    ):
        assert f"probably one under {key!r}: " in refused(functools.partial(opened, {key: value}))
    assert len(samples(opened({"url": "https://x.org/a.png", "number": 7, "kinds": ["a"]}))) == 1


def test_numbers_of_any_size_are_texts(data):
    assert said(data.json({"question": "How many?", "answer": 10**400}))[1] == ("gpt", str(10**400))
    pair = {"question": "a", "chosen": "b", "rejected": "c"}
    source = data.json(pair, *({**pair, "margin": each} for each in (10**400, "3", [1], True)), are_preferences=True)
    for number in range(1, 5):
        assert "under 'margin', expected a number" in rejected(source, number)


def test_answers_are_choices_whatever_stands_beside_them(data):
    """Of an explanation beside the number, and of choices in columns of their own."""
    row = {"question": "Which?", "choices": ["a", "b"], "answer": 1, "solution": "Because."}
    assert "its answers under 'answer', such as 1, are numbers or letters of 'choices'" in refused(
        lambda: data.parquet(row)
    )
    for names in (("A", "B"), ("choice_a", "choice_b"), ("option1", "option2")):
        row = {"question": "Which?", **dict.fromkeys(names, "x"), "answer": "B"}
        message = refused(functools.partial(data.json, row))
        assert f"such as 'B', are numbers or letters of {names[0]!r}" in message
    assert said(data.json({"question": "Which?", "A": "x", "answer": "A boat."}))[1] == ("gpt", "A boat.")


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"messages": [ASKED, SAID]}, "label"),
        ({"prompt": "What?", "completion": "A boat."}, "label"),
        ({"instruction": "What?", "output": "A boat."}, "kto_tag"),
    ],
)
def test_answers_that_are_marked_as_bad_ones_are_not_learned(data, record, key, kind):
    """Data for KTO have good and bad answers."""
    source = getattr(data, kind)({**record, key: True}, {**record, key: False})
    assert f"has False under {key!r}, so its answer is a bad one" in rejected(source, 1)
    text, *_ = source.read()
    assert to_sample(text.text, source, 0).messages[1].text == "A boat."
    assert "has 'False' under" in rejected(getattr(data, kind)({**record, key: "False"}))  # as CSV has it


def test_images_under_names_that_are_not_read_are_asked_about(data):
    """Else a model would learn to answer blindly."""
    one = data.folder / "x"
    one.mkdir()
    row = {"question": "What is it?", "answer": "A boat."}
    message = refused(lambda: data.parquet({**row, "jpg": {"bytes": png(4), "path": None}}))
    assert "no image under 'image' or 'images', but probably one under 'jpg': name it with" in message
    message = refused(lambda: data.json({**row, "image_1": "0.png", "image_2": "1.png"}))
    assert "probably one under 'image_1', 'image_2': put them in one list under 'images'" in message
    assert "probably one under 'photo': name it with --data_columns image=photo" in refused(
        lambda: data.csv("photo,question,answer\n0.png,What is it?,A boat.\n")
    )
    assert said(data.csv("photo,question,answer\n0.png,What is it?,A boat.\n", columns="image=photo")) == TALK
    assert "probably one under 'image_url': name it" in refused(
        lambda: data.json({**row, "image_url": "https://x.org/7"})
    )
    assert "'img_paths': name it" in refused(lambda: data.json({**row, "img_paths": ["0.png", "1.png"]}))
    assert len(samples(data.json({**row, "url": "https://x.org/a.png"}))) == 1  # where it is from
    for key, value in (("image_id", 7), ("imageId", "2370799"), ("img_name", "COCO_7")):
        message = refused(functools.partial(data.json, {**row, key: value}))
        assert f"probably one under {key!r}: write the paths of" in message
        assert len(samples(data.json({**row, key: value, "image": "0.png"}))) == 1
    text = base64.b64encode(png(9)).decode()
    assert "probably one under 'encoded': name it" in refused(lambda: data.json({**row, "encoded": text}))
    assert "looks like base64: put data:image/png" in rejected(data.json({**row, "image": text * 3}))
    assert len(samples(data.json({**row, "photo": "0.png"}, on_unmarked_image="text"))) == 1


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"frage": "What is it?", "antwort": "A boat."}, "question=frage,answer=antwort"),
        ({"frage": "What is it?", "antwort": "A boat."}, "query=frage,response=antwort"),
        ({"frage": "What is it?", "antwort": "A boat."}, "prompt=frage,completion=antwort"),
        ({"tell": "What is it?", "x": "", "said": "A boat."}, "instruction=tell,input=x,output=said"),
        ({"qa": [{"user": "What is it?", "assistant": "A boat."}]}, "texts=qa"),
        ({"qa": [{"user": "What is it?", "assistant": "A boat."}]}, "conversations=qa"),
        ({"question": "1", "antwort": "A boat.", "prompt": "What is it?"}, "prompt=prompt,answer=antwort"),
    ],
)
def test_any_part_of_a_form_may_be_named(data, record, columns):
    assert said(data.json({**record, "image": "0.png"}, columns=columns)) == TALK
    source = data.parquet({**record, "image": {"bytes": png(4), "path": None}}, columns=columns)
    assert said(source) == TALK and all(
        repr(pair.split("=")[1]) in source.describe() for pair in columns.split(",")[-1:]
    )


def test_a_column_that_is_named_has_to_be_there(data):
    row = {"question": "What?", "answer": "a", "img": {"bytes": png(4), "path": None}}
    assert "--data_columns answer=reply: no record of" in refused(
        lambda: data.json(row | {"img": 1}, columns="answer=reply")
    )
    assert "--data_columns image=imge: no record of" in refused(lambda: data.parquet(row, columns="image=imge"))


# CSV


def test_csv_of_questions_and_answers(data):
    quoted = '0.png,"What is it?","A ""big"", red\nboat."'
    several = '"[""0.png"",""1.png""]",Both?,Yes.'
    source = data.csv(f"image,question,answer\n{quoted}\n,Who?,Me.\n{several}\n")
    assert (
        "questions and answers in CSV; image from 'image', question from 'question', answer from" in source.describe()
    )
    found = samples(source)
    assert [sample.messages[1].text for sample in found] == ['A "big", red\nboat.', "Me.", "Yes."]
    assert [len(sample.media) for sample in found] == [1, 0, 2]
    assert [record.line for record in source.read()] == [3, 4, 5]


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("b.CSV", ",")])
def test_other_separators_of_csv(data, name, separator):
    rows = [["image", "question", "answer"], ["0.png", "What is it?", "A boat."]]
    assert said(data.csv("\n".join(separator.join(row) for row in rows), name)) == TALK


def test_csv_of_conversations_and_long_cells(data):
    talk = json.dumps([{"from": "human", "value": "What is it? " + "x" * 200_000}, {"from": "gpt", "value": "A boat."}])
    source = data.csv('image,conversations\n0.png,"{}"\n'.format(talk.replace('"', '""')))
    assert said(source)[1] == ("gpt", "A boat.")


def test_a_row_with_too_many_cells_is_rejected(data):
    source = data.csv("image,question,answer\n0.png,What is it?,A boat.\n0.png,What is it?,Yes, a boat.\n")
    assert "has 4 cells, but the header has 3: put texts that contain the separator in quotes" in rejected(source, 1)


def test_csv_without_usable_names_is_refused(data):
    for text, says in (("\n", "is empty, expected a line with the names"), ("a,b,a\n1,2,3\n", "the column 'a' twice")):
        with pytest.raises(DataError, match=says):
            data.csv(text)
    (data.folder / "u.csv").write_bytes("image,question,answer\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"u\.csv can't be read as CSV: it is UTF-16, save it as UTF-8"):
        data.open(data.folder / "u.csv")
    assert "no file exists at" in rejected(data.csv("image,question,answer\nx.png,a,b\n"))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_metadata_of_an_image_folder_may_hold_questions(data, suffix):
    row = {"file_name": "0.png", "question": "What is it?", "answer": "A boat."}
    path = data.folder / f"metadata.{suffix}"
    if suffix == "csv":
        path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    elif suffix == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    assert said(data.open(data.folder)) == TALK


# Preferences


def vision_pair() -> dict:
    """TRL's form, with parts that have every key, as a table gives them."""

    def part(kind: str, text: str | None = None) -> dict:
        return {"type": kind, "text": text}

    return {
        "images": [{"bytes": png(4), "path": None}],
        "prompt": [{"role": "user", "content": [part("image"), part("text", "What is it?")]}],
        "chosen": [{"role": "assistant", "content": [part("text", "A boat.")]}],
        "rejected": [{"role": "assistant", "content": [part("text", "A cat.")]}],
    }


def check_pair(source: Source, num_images: int = 1) -> None:
    [sample] = samples(source)
    assert source.format == "preference" and len(sample.media) == num_images
    assert (sample.messages[-1].text, sample.rejected[-1].text) == ("A boat.", "A cat.")
    assert "What is it?" in sample.messages[-2].text and sample.messages[:-1] == sample.rejected[:-1]


def test_trls_vision_preferences_in_tables(data):
    pair = vision_pair()
    check_pair(data.parquet(pair, are_preferences=True))
    whole = {**pair, "chosen": pair["prompt"] + pair["chosen"], "rejected": pair["prompt"] + pair["rejected"]}
    check_pair(data.parquet(whole, are_preferences=True))  # and the prompt once more
    del whole["prompt"]
    check_pair(data.parquet(whole, are_preferences=True))
    rows = datasets.Dataset.from_list([pair]).cast_column("images", datasets.List(datasets.Image()))
    rows.save_to_disk(data.folder / "saved")
    check_pair(data.open(data.folder / "saved", are_preferences=True))


def test_trls_preferences_with_images_inside_the_parts(data):
    pair = vision_pair()
    del pair["images"]
    pair["prompt"] = [
        {
            "role": "user",
            "content": [
                {"type": "image", "text": None, "image": {"bytes": png(5), "path": None}},
                {"type": "text", "text": "What is it?", "image": None},
            ],
        }
    ]
    source = data.parquet(pair, are_preferences=True)
    check_pair(source)
    assert samples(source)[0].media[0].refs[0].num_bytes == len(png(5))


PAIRS = {
    "alpaca": {"instruction": "What is", "input": "it? What is it?", "chosen": "A boat.", "rejected": "A cat."},
    "ms-swift": {"query": "What is it?", "response": "A boat.", "rejected_response": "A cat."},
    "ms-swift, messages": {"messages": [ASKED, SAID], "rejected_response": "A cat."},
    "ms-swift, two conversations": {
        "messages": [ASKED, SAID],
        "rejected_messages": [ASKED, {"role": "assistant", "content": "A cat."}],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "What is it?"}],
        "chosen": {"from": "gpt", "value": "A boat."},
        "rejected": {"from": "gpt", "value": "A cat."},
    },
    "JSON text": {
        "chosen": json.dumps([ASKED, SAID]),
        "rejected": json.dumps([ASKED, {"role": "assistant", "content": "A cat."}]),
    },
    "RLAIF-V": {"question": "What is it?", "chosen": "A boat.", "rejected": "A cat.", "origin_dataset": "x", "idx": 3},
}


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_preferences(data, form, kind):
    image = {"image": "0.png"} if kind == "json" else {"image": {"bytes": png(4), "path": None}}
    check_pair(getattr(data, kind)({**PAIRS[form], **image}, are_preferences=True))


def test_columns_of_preferences_may_be_named(data):
    record = {"ask": "What is it?", "good": "A boat.", "bad": "A cat.", "by": 2, "image": "0.png"}
    source = data.json(record, columns="prompt=ask,chosen=good,rejected=bad,margin=by", are_preferences=True)
    check_pair(source)
    assert samples(source)[0].margin == 2


def test_preferences_that_miss_one_name_it(data):
    good = {"query": "a", "response": "b", "rejected_response": "c"}
    source = data.json(good, {"query": "a", "rejected_response": "c"}, are_preferences=True)
    assert "has no answer under 'chosen'" in rejected(source, 1)
    source = data.json(good, {"messages": [ASKED, SAID], "rejected": 3}, are_preferences=True)
    assert "has 3 under 'rejected', expected text, a message or a list of messages" in rejected(source, 1)


def test_preferences_of_ultrafeedback_repeat_the_question(data):
    record = {"prompt": ASKED["content"], "chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "A cat."}]}
    record |= {"messages": [ASKED, SAID], "image": "0.png"}
    check_pair(data.json(record, are_preferences=True))
    source = data.json(record, {**record, "prompt": "Another?"}, are_preferences=True)
    assert "has both 'messages' and 'prompt': give the question once" in rejected(source, 1)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_images_of_a_rejected_answer_are_not_left_out(data, kind):
    record = {"messages": [ASKED, SAID], "rejected_response": "A car.", "images": ["0.png"]}
    source = getattr(data, kind)({**record, "rejected_images": ["1.png"]}, are_preferences=True)
    assert "has 'rejected_images': pairs whose answers have images of their own" in rejected(source)


# Hostile values


def test_json_text_inside_a_table_brings_no_reference_of_its_own(data):
    def record(image: object) -> dict:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
        return {"messages": json.dumps([{"role": "user", "content": parts}, SAID])}

    source = data.parquet(record("0.png"))
    assert len(samples(source)[0].media) == 1
    forged = {"llava_ds_file": min(source.slices_of), "offset": 0, "num_bytes": 3}
    assert "but its text has 1 <image> marks" in rejected(data.parquet(record(forged)))  # its file is dropped


@pytest.mark.parametrize("value", ["[" * 100_000, '{"a":' * 5000])
def test_nested_json_text_is_rejected(data, value):
    good = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]}
    assert "under 'conversations' that is" in rejected(data.json(good, {"conversations": value}), 1)
    good = {"question": "a", "answers": "b"}
    assert "that is not a JSON list" in rejected(data.json(good, {"question": "a", "answers": "[" * 100_000}), 1)
