"""Fields of turns and records that say what is learned: thoughts, calls, weights; other keys are refused or listed."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from llava_ds.constants import DataError
from llava_ds.data.sample import Message, Sample
from llava_ds.data.sources import SourceOptions, open_sources, to_sample

CALL = {"type": "function", "function": {"name": "zoom", "arguments": {"x": 3}}}
TOOL = {"name": "zoom", "description": "Zoom in.", "parameters": {"type": "object"}}


def samples(folder, records: list[dict], **options) -> list[Sample]:
    path = folder / "data.json"
    path.write_text(json.dumps(records))
    [source] = open_sources(str(path), SourceOptions(cache_dir=str(folder / "cache"), **options))
    return [to_sample(record.text, source, record.index) for record in source.read()]


def chat(*answers: dict | str, **fields) -> dict:
    """A record of messages, with a question before every answer."""
    turns = []
    for i, answer in enumerate(answers):
        own = {"content": answer} if isinstance(answer, str) else {"content": "A cat.", **answer}
        turns += [{"role": "user", "content": f"Question {i}"}, {"role": "assistant", **own}]
    return {"messages": turns, **fields}


def answers(folder, record: dict) -> list[Message]:
    [sample] = samples(folder, [record])
    return [message for message in sample.messages if message.role == "gpt"]


def refused(folder, record: dict) -> str:
    with pytest.raises(DataError) as caught:
        samples(folder, [record])
    return str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "It purrs."},
        {"reasoning": "It purrs.", "thinking": None},
        {"thinking": "It purrs.", "reasoning_content": "It purrs."},
        {
            "content": [
                {"type": "thinking", "thinking": "It purrs.", "signature": "x"},
                {"type": "text", "text": "A cat."},
            ]
        },
        {"content": [{"type": "reasoning", "text": "It purrs."}, {"type": "output_text", "text": "A cat."}]},
    ],
)
def test_a_thought_is_read_from_a_field_or_a_part(tmp_path, answer):
    [message] = answers(tmp_path, chat(answer))
    assert (message.text, message.thought) == ("A cat.", "It purrs.")


def test_empty_fields_are_as_absent(tmp_path):
    empty = {"reasoning": "", "tool_calls": [], "annotations": None, "refusal": "", "weight": None, "extra": {}}
    assert answers(tmp_path, chat(empty)) == [Message("gpt", "A cat.")]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": json.dumps([CALL])},
        {"content": "", "tool_calls": [{"id": "", "index": 0, "name": "zoom", "arguments": '{"x": 3}'}]},
        {"content": None, "function_call": {"name": "zoom", "arguments": '{"x": 3}'}},
    ],
)
def test_tool_calls_of_a_turn_are_read(tmp_path, turn):
    record = {"messages": [{"role": "user", "content": "Look."}, {"role": "assistant", **turn}]}
    [message] = answers(tmp_path, record)
    assert message.text == "" and json.loads(message.tool_calls) == [CALL]


def test_calls_and_results_as_turns_of_their_own(tmp_path):
    """As LLaMA-Factory has them, and as ms-swift, where calls belong to the answer before them."""
    call = json.dumps({"name": "zoom", "arguments": {"x": 3}})
    factory = [
        {"from": "human", "value": "Look."},
        {"from": "function_call", "value": f"<think>\nCloser.\n</think>\n{call}"},
        {"from": "observation", "value": "It grew."},
        {"from": "gpt", "value": "A cat."},
    ]
    swift = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I zoom.", "loss": 0},
        {"role": "tool_call", "content": call, "loss": False},
        {"role": "tool_call", "content": f"[{call}]", "loss": False},
        {"role": "tool_response", "content": "It grew.", "tool_call_id": "a", "name": "zoom"},
        {"role": "assistant", "content": "A cat."},
    ]
    [one] = samples(tmp_path, [{"conversations": factory, "tools": json.dumps([TOOL])}])
    assert [m.role for m in one.messages] == ["human", "gpt", "tool", "gpt"]
    assert one.messages[1].thought == "Closer." and json.loads(one.messages[1].tool_calls) == [CALL]
    assert json.loads(one.tools) == [{"type": "function", "function": TOOL}]
    [two] = samples(tmp_path, [{"messages": swift, "tools": [json.dumps({"type": "function", "function": TOOL})]}])
    assert [m.role for m in two.messages] == ["human", "gpt", "tool", "gpt"]
    assert two.messages[1].text == "I zoom." and json.loads(two.messages[1].tool_calls) == [CALL, CALL]
    assert [m.weight for m in two.messages] == [1, 0, 1, 1]
    assert (two.messages[2].name, two.messages[2].call_id) == ("zoom", "a")
    assert two.tools == one.tools


def test_marks_in_thoughts_and_calls_are_words(tmp_path):
    call = {"name": "show", "arguments": {"what": "<image>"}}
    [message] = answers(tmp_path, chat({"thinking": "An <image>?", "tool_calls": [call]}))
    assert "<image>" not in message.thought and "<image>" not in message.tool_calls


@pytest.mark.parametrize("key", ["weight", "loss", "loss_scale", "train", "training", "trainable", "loss_mask"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_answers_are_switched_off(tmp_path, key, off):
    assert [m.weight for m in answers(tmp_path, chat({key: off}, "Yes.", {key: 1}))] == [0, 1, 1]
    llava = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me.", key: off}]}
    assert [m.weight for m in answers(tmp_path, llava)] == [0]
    assert [m.weight for m in answers(tmp_path, chat("No.", "Yes.", **{key: [0, off, 0, 1]}))] == [0, 1]
    assert [m.weight for m in answers(tmp_path, chat("No.", "Yes.", **{key: [off, True]}))] == [0, 1]


@pytest.mark.parametrize("key", ["weights", "loss_weights", "loss_scales", "loss_masks"])
def test_a_records_list_may_have_its_plural(tmp_path, key):
    for values in ([0, 0, 0, 1], [False, True], "[0, 1]"):
        assert [m.weight for m in answers(tmp_path, chat("No.", "Yes.", **{key: values}))] == [0, 1]
    assert "they contradict each other" in refused(tmp_path, chat("a", weight=[0], **{key: [1]}))
    assert f"has 3 values under {key!r} for 4 turns with 2 answers" in refused(
        tmp_path, chat("a", "b", **{key: [1] * 3})
    )
    assert samples(tmp_path, [chat("a", **{key: 0.5})])[0].unread == (key,)


def test_fractions_weigh(tmp_path):
    assert [m.weight for m in answers(tmp_path, chat({"weight": 0.25}, {"loss_scale": 2}))] == [0.25, 2]
    assert [m.weight for m in answers(tmp_path, chat("a", "b", loss_mask="[0.5, 1]"))] == [0.5, 1]


def test_a_record_may_be_switched_off(tmp_path):
    assert [m.weight for m in answers(tmp_path, chat("a", "b", train=False))] == [0, 0]
    assert [m.weight for m in answers(tmp_path, chat("a", "b", loss_mask=0, trainable=False))] == [0, 0]
    assert "they contradict each other" in refused(tmp_path, chat("a", train=False, trainable=1))


def test_a_records_number_that_may_be_anything_is_named_as_not_read(tmp_path):
    found = samples(tmp_path, [chat("a", weight=12.5, loss=0.3), chat("a", loss="low", train=1)])
    assert [sample.unread for sample in found] == [("weight", "loss"), ("loss",)]
    assert [sample.messages[-1].weight for sample in found[:1]] == [1]


def test_a_questions_weight_of_nothing_changes_nothing(tmp_path):
    record = chat("No.")
    record["messages"][0] |= {"weight": 0, "train": False}
    assert [m.weight for m in samples(tmp_path, [record])[0].messages] == [1, 1]


def with_turn(**fields) -> dict:
    record = chat("No.")
    record["messages"][0] |= fields
    return record


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (chat({"weight": 0, "loss": True}), "turn 1 has the weights 0 and 1: they contradict each other"),
        (chat({"loss": 1}, loss_mask=[0]), "turn 1 has the weights 1 and 0: they contradict each other"),
        (chat("a", "b", loss_mask=[1, 0, 1]), "has 3 values under 'loss_mask' for 4 turns with 2 answers"),
        (chat({"weight": -1}), "turn 1 has -1 under 'weight', expected true, false or a weight from 0"),
        (chat({"train": "no"}), "turn 1 has 'no' under 'train'"),
        (chat({"weight": float("nan")}), "under 'weight'"),
        (chat({"weight": 1e39}), "turn 1 has 1e+39 under 'weight', expected true, false or a weight from 0 to 1,000"),
        (chat("a", weight=["x", "y"]), "has 'x' under 'weight'"),
        (with_turn(train=True), "turn 0 is not an answer and has the weight 1, but only answers are learned"),
        (chat("a", loss_mask=[1, 1]), "turn 0 is not an answer and has the weight 1"),
        (chat({"reasoning": "a", "thinking": "b"}), "turn 1 has two thoughts, 'a' and 'b'"),
        (
            chat({"content": [{"type": "thinking", "thinking": "a", "train": False}, {"type": "text", "text": "b"}]}),
            "turn 1 has a part of type 'thinking' with the key 'train': it is not read",
        ),
        (chat({"reasoning": {"effort": "low"}}), "turn 1 has {'effort': 'low'} for a thought, expected text"),
        (
            chat({"content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}),
            "turn 1 has thoughts between its parts, expected one thought before the answer",
        ),
        (chat({"content": [{"type": "reasoning", "summary": []}]}), "expected text under 'reasoning'"),
        (with_turn(thinking="b"), "turn 0 has a thought, allowed in answers only, but is from 'user'"),
        (with_turn(tool_calls=[CALL]), "turn 0 has tool calls, allowed in answers only, but is from 'user'"),
        (chat({"tool_calls": [{"name": "zoom", "input": {"x": 3}}]}), "turn 1 has the tool call {'input': {'x': 3}, "),
        (chat({"tool_calls": [{"function": {"name": "zoom", "arguments": [3]}}]}), "has the arguments [3] in a tool"),
        (chat({"tool_calls": [{"function": {"name": "zoom", "arguments": "x=3"}}]}), "not valid JSON"),
        (chat({"tool_calls": "zoom(3)"}), "turn 1 has 'zoom(3)' for its tool calls, not valid JSON"),
        (chat("a", tools={"name": "zoom"}), "under 'tools', expected a list of"),
        (chat("a", tools=[{"description": "z"}]), "has {'description': 'z'} under 'tools', expected a list of"),
        (chat("a", tools="zoom"), "has 'zoom' under 'tools', not valid JSON"),
        (chat("a", chat_template_kwargs=[1]), "has [1] under 'chat_template_kwargs', expected an object"),
        (chat({"thoughts": "a"}), "turn 1 has the key 'thoughts': it is not read, "),
        (chat({"wieght": 0}), "turn 1 has the key 'wieght': it is not read, did you mean weight?"),
        (with_turn(images=["a.png"]), "turn 0 has the key 'images': it is not read"),
        (with_turn(name=3), "turn 0 has 3 under 'name', expected text"),
        (with_turn(**{"from": "gpt"}, value="Question 0"), "it gives its role or its text twice, with"),
    ],
)  # fmt: skip
def test_fields_that_can_not_be_honoured_are_refused(tmp_path, record, why):
    assert why in refused(tmp_path, record)


def test_calls_that_are_no_texts_or_contradict_their_answer_are_refused(tmp_path):
    turns = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I zoom.", "loss": False}]
    call = {"role": "tool_call", "content": '{"name": "zoom"}'}
    assert "continues the answer before it, but has another weight" in refused(tmp_path, {"messages": [*turns, call]})
    listed = {"role": "tool_call", "content": [{"type": "text", "text": "x"}]}
    assert "turn 2, from 'tool_call', has" in refused(tmp_path, {"messages": [*turns, listed]})
    twice = {"role": "tool_call", "content": '<think>a</think>{"name": "zoom"}', "reasoning": "b"}
    assert "two thoughts, one of them in its text" in refused(tmp_path, {"messages": [*turns, twice]})


def test_marks_of_boxes_in_thoughts_are_refused(tmp_path):
    record = chat({"thinking": "In <bbox>."}, objects={"bbox": [[1, 2, 3, 4]]})
    assert "has marks for 'objects' in a thought or a tool call" in refused(tmp_path, record)


def test_keys_of_records_that_are_not_read_are_named(tmp_path):
    found = samples(tmp_path, [chat("a", url="x", note=None, tools=[TOOL]), chat("b", score=0), chat("c", id="z")])
    assert [sample.unread for sample in found] == [("url",), ("score",), ()]


def test_columns_of_tables_that_are_not_read_are_named(tmp_path):
    """A struct's keys without a value in a turn are as absent, in calls and in tools, too."""
    turns = chat({"tool_calls": [CALL]}, {"weight": 0.0, "reasoning_content": "b"}, "c")["messages"]
    keys = {key for turn in turns for key in turn}
    row = {"messages": [{key: turn.get(key) for key in keys} for turn in turns], "url": "x", "tools": [TOOL]}
    row["loss_mask"] = [None, 1, None, 0, None, None]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    [source] = open_sources(str(tmp_path / "data.parquet"), SourceOptions(cache_dir=str(tmp_path / "cache")))
    [sample] = [to_sample(record.text, source, record.index) for record in source.read()]
    assert sample.unread == source.unread_columns == ("url",)
    first, second, third = [message for message in sample.messages if message.role == "gpt"]
    assert json.loads(first.tool_calls) == [CALL] and (second.thought, second.weight) == ("b", 0)
    assert third == Message("gpt", "c") and json.loads(sample.tools)[0]["function"] == TOOL


def test_other_columns_are_kept_on_request(tmp_path):
    """All values of a record, read or not, except its id, conversation, media, and files as bytes."""
    more = {"solution": "3", "kind": "count", "level": [1, None], "score": {"a": 0.5}}
    [sample] = samples(tmp_path, [chat("a", id="z", image=[], **more)], other_columns=True)
    assert json.loads(sample.other_columns) == more and sample.unread == ()
    assert samples(tmp_path, [chat("a", **more)])[0].other_columns == ""
    row = {"prompt": "How many?", "solution": "3", "level": "easy", "raw": b"x", "note": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    for others, kept in ((True, {"solution": "3", "level": "easy"}), (False, None)):
        options = SourceOptions(cache_dir=str(tmp_path / "cache"), on_unmarked_image="text", other_columns=others)
        [source] = open_sources(str(tmp_path / "data.parquet"), options)
        [sample] = [to_sample(record.text, source, record.index) for record in source.read()]
        assert sample.messages[-1].text == "3" and kept == (json.loads(sample.other_columns or "null"))


def test_preferences_may_differ_in_thoughts_and_calls(tmp_path):
    def answer(**fields) -> list[dict]:
        return [{"role": "assistant", "content": "A cat.", **fields}]

    record = {"prompt": "What is it?", "tools": [TOOL], "page": 3}
    pairs = [{"reasoning": "x"}, {"tool_calls": [CALL]}, {}]
    records = [{**record, "chosen": answer(**one), "rejected": answer(thinking="y")} for one in pairs]
    found = samples(tmp_path, records, are_preferences=True)
    assert [pair.messages[-1].thought for pair in found] == ["x", None, None]
    assert [pair.rejected[-1].thought for pair in found] == ["y", "y", "y"]
    assert json.loads(found[1].messages[-1].tool_calls) == [CALL] and found[0].unread == ("page",)
    both = {**record, "chosen": answer(reasoning="x"), "rejected": answer(thinking="x")}
    with pytest.raises(DataError, match="chosen and rejected answers are the same"):
        samples(tmp_path, [both], are_preferences=True)
