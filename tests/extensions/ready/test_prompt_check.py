"""What asks for an answer is the beginning of what was learned, for every template, or the data are refused."""

import copy
import importlib.util
import json
import pickle
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import ready_models
import toys
from daily import few
from launching import ROOT
from PIL import Image
from ready_models import FAMILIES, MARKED, OPEN_THOUGHT_TEMPLATE, REASONING_TEMPLATE, TEMPLATES, VARIABLES
from test_goldens import TOKENIZERS, tokenizer_of
from thinking_templates import QWEN3
from token_text import text_of_ids

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, ConfigError
from llava_ds.data.encode import Encoder, EncodingOptions, encoder_of
from llava_ds.data.end_markers import check_tokenizer
from llava_ds.data.prompt_check import PromptCheck, fitting_variables, has_thought, with_generation_prompt
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.templates import TEMPLATES as LLAVAS
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import read_parts
from llava_ds.template_variables import with_defaults
from llava_ds.tokenizer import as_llava

IMAGES = ImageOptions(336, 14, (0.5, 0.5, 0.5))
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
# Qwen3's: the prompt leaves it to the model whether to think, and an answer without a thought has an empty one.
FREE_TEMPLATE = OPEN_THOUGHT_TEMPLATE.replace("assistant\n<think>\n' }}{%- endif -%}", "assistant\n' }}{%- endif -%}")
# The prompt has an empty thought, which no answer gets.
EMPTY_THOUGHT_TEMPLATE = ready_models.QWEN3_TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)
# Thoughts in a channel, and a level of them that is asked for in the system turn.
CHANNEL_TEMPLATE = (
    "{{ '<|im_start|>system\\nEffort: ' + effort | default('high') + '<|im_end|>\\n' }}{%- for m in messages -%}"
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' -%}"
    "{%- if m.reasoning_content -%}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}"
    "{%- elif not show_thoughts | default(true) -%}{{ '[THINK][/THINK]' }}{%- endif -%}{%- endif -%}"
    "{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for part in m['content'] -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' + ('[THINK]' if show_thoughts | default(true) else '[THINK][/THINK]') }}"
    "{%- endif -%}"
)
SHOWN = {"show_thoughts": False}
# An empty thought in every prompt, and before every answer without one.
EMPTY_FOR_ALL = REASONING_TEMPLATE.replace("enable_thinking is defined and enable_thinking is false", "true")


@cache
def parts_of(family: str, folder: Path):
    ready_models.write_ready(folder, family)
    parts = read_parts(ModelArguments(model_name_or_path=str(folder)))
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    return parts.open_tokenizer(), parts.tower.image_options(args)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def check_of(folders: Path, family: str, source: str, joined: bool = False) -> PromptCheck:
    """joined: two line breaks are one token, as in published tokenizers."""
    tokenizer, images = parts_of(family, folders / family)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = source
    if joined:
        tokenizer.add_tokens(["\n\n"])
    return PromptCheck(encoder_of(tokenizer, EncodingOptions("processor", 4096), images), images)


@pytest.mark.parametrize("source", ["own", "marked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_ready_family_asks_as_it_learns_or_is_refused(folders, family, source):
    template = {"own": TEMPLATES, "marked": MARKED}[source][family]
    check = check_of(folders, family, with_defaults(template, VARIABLES.get(family, {})))
    assert check.forms().fits(False)
    if family in ready_models.WITH_VIDEOS:
        assert check.forms(with_video=True).fits(False)
    if family in VARIABLES:
        without = check_of(folders, family, template)
        assert not without.forms().fits(False) and not without.forms(with_video=True).fits(False)
        assert json.loads(fitting_variables(without, {False})) == VARIABLES[family]


# sentencepiece's own default makes a space of a line break, which becomes a part of the answer's first word.
NOT_LEARNED = {("mistral_zephyr", "sp_default")}
LLAVAS_OWN = [name for name in LLAVAS if LLAVAS[name].write is not None]


@pytest.mark.parametrize("name", few(TOKENIZERS, ("llama_slow_legacy", "llama3", "neox", "qwen", "sp_default")))
def test_every_template_of_llavas_asks_as_it_learns(name):
    tokenizer = as_llava(tokenizer_of(name))
    fitting = [template for template in LLAVAS_OWN if not check_tokenizer(template, tokenizer)]
    assert fitting
    for template in fitting:
        forms = PromptCheck(Encoder(tokenizer, EncodingOptions(template, 4096)), IMAGES).forms()
        assert forms.fits(False) == ((template, name) not in NOT_LEARNED), template


# Published ones without a prompt: the text that asks ends with the question's own [/INST].
INST = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{ 'BEGIN' + m['content'] + ' [/INST]' }}"
    "{%- else -%}{{ ANSWER + eos_token }}{%- endif -%}{%- endfor -%}"
)
WITHOUT_PROMPT = {
    "mistral v1": ("[INST] ", "m['content']", ""),
    "mistral v2": (" [INST] ", "' ' + m['content']", " "),
    "mistral v3": ("[INST] ", "' ' + m['content'] | trim", " "),
    "llama 2": ("[INST] ", "' ' + m['content'] + ' '", " "),
    "marked": ("[INST] ", "' ' }}{% generation %}{{ m['content']", " "),
}


@pytest.mark.parametrize("name", few(sorted({*TOKENIZERS} - {"qwen"}), ("llama_slow_legacy", "llama3", "sp_default")))
@pytest.mark.parametrize("case", WITHOUT_PROMPT)
def test_the_space_before_an_answer_is_learned_with_it(name, case):
    """No token ends between the text that asks and this space, which is a part of the answer's first token."""
    begin, written, space = WITHOUT_PROMPT[case]
    source = INST.replace("BEGIN", begin).replace("ANSWER", written)
    if case == "marked":
        source = source.replace("eos_token }}", "eos_token }}{% endgeneration %}")
    tokenizer = copy.deepcopy(as_llava(tokenizer_of(name)))
    tokenizer.chat_template = source
    encoder = Encoder(tokenizer, EncodingOptions("chat_template", 4096))
    assert PromptCheck(encoder, IMAGES).forms().fits(False) and not check_tokenizer("chat_template", tokenizer)
    talk = (Message("human", "<image>\nWhat?"), Message("gpt", "A red cat."), Message("human", "Why?"))
    whole = encoder.encode_whole(Transcript((*talk, Message("gpt", "So it is."))), [3])
    asked = [encoder.prompt_ids(talk[:1], [3]), encoder.prompt_ids(talk, [3])]
    for prompt in asked:
        assert whole.input_ids[: len(prompt)].tolist() == prompt and whole.labels[len(prompt)] != IGNORE_INDEX
    assert (whole.labels[len(asked[1]) :] != IGNORE_INDEX).all()
    first = text_of_ids([i for i in whole.labels[: len(asked[1])] if i != IGNORE_INDEX], tokenizer)
    assert first.startswith(f"{space}A red cat.") and (whole.labels[: len(asked[0])] == IGNORE_INDEX).all()


# Template and variables; whether plain answers and those with a thought fit; what makes each fit.
CASES = {
    "open": (OPEN_THOUGHT_TEMPLATE, {}, False, True, None, {}),
    "reasoning": (REASONING_TEMPLATE, {}, False, True, OFF, OFF | ON),
    "reasoning, off": (REASONING_TEMPLATE, OFF, True, False, OFF, ON),
    "reasoning, on": (REASONING_TEMPLATE, ON, False, True, OFF, ON),
    "free": (FREE_TEMPLATE, {}, True, True, None, None),
    "empty": (EMPTY_THOUGHT_TEMPLATE, {}, False, False, None, None),
    "channel": (CHANNEL_TEMPLATE, {}, False, True, SHOWN, None),
    "channel, off": (CHANNEL_TEMPLATE, SHOWN | {"effort": "low"}, True, False, SHOWN, {"show_thoughts": True}),
}


@pytest.mark.parametrize("joined", [False, True], ids=["", "joined"])
@pytest.mark.parametrize("case", CASES)
def test_thoughts_that_are_asked_for_are_those_that_are_learned(folders, case, joined):
    source, variables, plain, thought, for_plain, for_thought = CASES[case]
    check = check_of(folders, "qwen3_5", with_defaults(source, variables), joined)
    forms = check.forms()
    assert (forms.fits(False), forms.fits(True)) == (plain, thought)
    assert check.forms(json.dumps(variables)) == forms if variables else True  # as a record's own ones
    for with_thought, expected in ((False, for_plain), (True, for_thought)):
        found = fitting_variables(check, {with_thought})
        if expected and not forms.fits(with_thought):
            assert json.loads(found) == {**variables, **expected}
        elif not forms.fits(with_thought):
            assert found is None
    again = pickle.loads(pickle.dumps(check))
    assert again.forms() == forms


CALL = json.dumps([{"type": "function", "function": {"name": "look", "arguments": {}}}])


def test_answers_that_call_a_tool_are_asked_for_with_their_thoughts(folders):
    """A template that writes thoughts beside calls alone, and asks behind an empty one."""
    source = QWEN3.replace("(loop.last or thought)", "(not m['tool_calls'] or thought)").replace(
        "<think>\\n' + thought", "<think>\\n' + (thought if m['tool_calls'] else '')"
    )
    asks_empty = source.replace(
        "assistant\\n' }}{%- endif -%}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    )
    assert asks_empty != source
    talk = Transcript((Message("human", "What?"), Message("gpt", "", "It has ears.", CALL)))
    for each, fits in ((source, True), (asks_empty, False)):
        check = check_of(folders, "qwen3_5", each)
        assert (check.forms().fits(False), check.forms().fits(True)) == (True, fits)
        assert bool(check.reason(talk, ())) is not fits


def learned(check: PromptCheck, answer: Message) -> str:
    """The text that is supervised."""
    encoded = check.encoder.encode_whole(Transcript((Message("human", "What?"), answer)), ())
    return check.encoder.tokenizer.decode(encoded.labels[encoded.labels != IGNORE_INDEX])


def test_all_behind_the_prompt_is_learned(folders):
    """The end of a thought that is open, and a thought that the prompt leaves to the model."""
    plain, thinking = Message("gpt", "A cat."), Message("gpt", "A cat.", thought="It has ears.")
    end = "A cat.<|im_end|>"
    free = check_of(folders, "qwen3_5", FREE_TEMPLATE)
    assert learned(free, plain) == f"<think>\n\n</think>\n\n{end}"
    assert learned(free, thinking) == f"<think>\nIt has ears.\n</think>\n\n{end}"
    reasoning = check_of(folders, "qwen3_5", REASONING_TEMPLATE)
    assert learned(reasoning, thinking) == f"It has ears.\n</think>\n\n{end}"
    off = check_of(folders, "qwen3_5", with_defaults(REASONING_TEMPLATE, OFF))
    assert learned(off, plain) == end


def test_a_template_that_marks_less_than_it_asks_for_does_not_fit(folders):
    inside = FREE_TEMPLATE.replace(
        "{{ text + '<|im_end|>\n' }}",
        "{%- if message['role'] == 'assistant' -%}{% generation %}{{ text + '<|im_end|>' }}{% endgeneration %}"
        "{{ '\n' }}{%- else -%}{{ text + '<|im_end|>\n' }}{%- endif -%}",
    )
    forms = check_of(folders, "qwen3_5", inside).forms()
    assert forms.plain.why == "not every token after the prompt is learned"
    assert forms.plain.learned.startswith(forms.plain.asked)


def test_an_answer_whose_line_break_joins_the_prompt_is_rejected(folders):
    check = check_of(folders, "qwen3_vl", ready_models.QWEN3_TEMPLATE, joined=True)
    talk = partial(Message, "gpt")
    whole = [Transcript((Message("human", "What?"), talk(text))) for text in ("A cat.", "\nA cat.", "  A cat.")]
    reasons = [check.reason(each, ()) for each in whole]
    assert [bool(reason) for reason in reasons] == [False, True, False]
    assert reasons[1].startswith("its last answer begins with a line break: asked is ")
    assert reasons[1].endswith("their tokens differ where the first one ends): take the line break away")
    # Where the tokenizer does not join them, all is well.
    assert not check_of(folders, "qwen3_vl", ready_models.QWEN3_TEMPLATE).reason(whole[1], ())


def test_a_thought_is_one_with_words():
    assert has_thought(Message("gpt", "A", thought="Hm.")) and has_thought(Message("gpt", "<think>Hm.</think>A"))
    assert not any(has_thought(Message("gpt", "A", thought=thought)) for thought in (None, "", " \n"))


@pytest.fixture(scope="module")
def inspect_data():
    spec = importlib.util.spec_from_file_location("inspect_data", ROOT / "run" / "inspect_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def inspected(inspect_data, tmp_path, capsys):
    """Records through run/inspect_data.py: rows of --jsonl, and the output."""

    def run(model: Path, records: list[dict], *flags: str) -> tuple[list[dict], str]:
        data, out = tmp_path / "data.json", tmp_path / "out.jsonl"
        data.write_text(json.dumps(records))
        Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "0.png")
        inspect_data(
            [
                *("--model_name_or_path", str(model), "--data_path", str(data), "--image_folder", str(tmp_path)),
                *("--cache_dir", str(tmp_path / "cache"), "--jsonl", str(out), "--preprocessing_num_workers", "1"),
                *("--model_max_length", "512", *flags),
            ]
        )
        return [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out

    return run


def record(id: str, answer: str, *, thought: str | None = None, **more) -> dict:
    turn = {"role": "assistant", "content": answer, **({} if thought is None else {"reasoning_content": thought})}
    return {"id": id, "images": ["0.png"], "messages": [{"role": "user", "content": "<image>\nWhat?"}, turn], **more}


PLAIN = [record(str(i), answer) for i, answer in enumerate(("A cat.", "Two dogs.", "Red.", "No."))]
THINKING = [{**record(str(i), "A cat.", thought="It has ears.")} for i in range(3)]


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reasoning")
    ready_models.write_ready(folder, "qwen3_vl", template=REASONING_TEMPLATE)
    return folder


def test_answers_without_the_thought_that_is_asked_for_are_refused_before_they_are_encoded(inspected, reasoning):
    with pytest.raises(ConfigError) as refused:
        inspected(reasoning, PLAIN)
    assert str(refused.value) == (
        "the answers of the first 4 records have no thought, but the prompt for them differs from the "
        "text before them in training. After a question, the chat template writes\n"
        "  asked:   '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n'\n"
        "  learned: '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nA circle.<|im_end|>\\n' "
        "(a thought is asked for, and an empty one learned)\n"
        "The prompt must be the beginning of the training text: give --chat_template_kwargs "
        "'{\"enable_thinking\": false}', under which it is"
    )
    rows, shown = inspected(reasoning, PLAIN, "--chat_template_kwargs", json.dumps(OFF))
    assert [row["supervised_text"] for row in rows] == [
        f"{answer}<|im_end|>" for answer in ("A cat.", "Two dogs.", "Red.", "No.")
    ]
    assert "chat template: enable_thinking = false\n" in shown


def test_answers_with_a_thought_where_none_is_asked_for_are_refused(inspected, reasoning):
    rows, _ = inspected(reasoning, THINKING)
    assert {row["supervised_text"] for row in rows} == {"It has ears.\n</think>\n\nA cat.<|im_end|>"}
    with pytest.raises(ConfigError, match="the first 3 records have a thought") as refused:
        inspected(reasoning, THINKING, "--chat_template_kwargs", json.dumps(OFF))
    assert "give --chat_template_kwargs '{\"enable_thinking\": true}'" in str(refused.value)


def test_single_records_are_rejected_by_name_and_may_bring_their_own_variables(inspected, reasoning):
    mixed = [*THINKING, record("plain", "A cat."), record("empty", "A cat.", thought=" ")]
    mixed += [record("own", "A cat.", chat_template_kwargs=OFF)]
    mixed += [record("wrong", "A cat.", thought="Hm.", chat_template_kwargs=OFF)]
    rows, shown = inspected(reasoning, mixed)
    rejected = {row["id"]: row["rejected"] for row in rows if "rejected" in row}
    assert list(rejected) == ["plain", "empty", "wrong"]
    for id in ("plain", "empty"):
        assert rejected[id].startswith("its last answer has no thought, but the prompt for it differs")
        assert rejected[id].endswith('one learned): give it chat_template_kwargs {"enable_thinking": false}')
    assert rejected["wrong"].startswith("its last answer has a thought, but the prompt")
    assert [row["supervised_text"] for row in rows if row["id"] == "own"] == ["A cat.<|im_end|>"]
    assert "7 records: 4 accepted, 3 rejected" in shown


def test_a_record_whose_variables_the_template_does_not_read_is_rejected(inspected, reasoning):
    records = [*THINKING, record("own", "A cat.", thought="Hm.", chat_template_kwargs={"thinking": True})]
    rows, _ = inspected(reasoning, records)
    assert rows[3]["rejected"].startswith(
        "its chat_template_kwargs sets 'thinking', but the chat template does not read it: the variables that it reads"
    )


def test_a_record_whose_variables_leave_the_end_marker_out_is_rejected(inspected, tmp_path):
    close = "{% if message['role'] != 'assistant' or closed | default(true) %}{{ '<|im_end|>\\n' }}{% endif %}"
    source = ready_models.QWEN3_TEMPLATE.replace("{{ '<|im_end|>\n' }}", close)
    assert source != ready_models.QWEN3_TEMPLATE
    ready_models.write_ready(tmp_path / "model", "qwen3_vl", template=source)
    records = [*PLAIN, *(record(str(on), "A cat.", chat_template_kwargs={"closed": on}) for on in (True, False))]
    rows, _ = inspected(tmp_path / "model", records)
    assert [row["id"] for row in rows if "rejected" in row] == ["False"]
    assert "no special token ends it" in rows[-1]["rejected"]
    assert rows[-2]["supervised_text"] == "A cat.<|im_end|>"


def test_an_answer_that_is_not_learned_is_not_asked_for(inspected, reasoning):
    turns = PLAIN[0]["messages"]
    off = {
        "id": "off",
        "images": ["0.png"],
        "messages": [*turns, turns[0] | {"content": "Why?"}, {**turns[1], "weight": 0}],
    }
    rows, _ = inspected(reasoning, [*THINKING, off])
    assert "rejected" not in rows[3]


@pytest.mark.parametrize(
    ("source", "records", "advice"),
    [
        (OPEN_THOUGHT_TEMPLATE, PLAIN, ": use answers with thoughts (reasoning_content in a turn), or put"),
        (EMPTY_THOUGHT_TEMPLATE, PLAIN, "or put another chat template into the model's folder (chat_template.jinja)"),
    ],
    ids=["open", "empty"],
)
def test_a_template_without_such_a_variable_says_what_else_helps(inspected, tmp_path, source, records, advice):
    ready_models.write_ready(tmp_path / "model", "qwen3_vl", template=source)
    with pytest.raises(ConfigError) as refused:
        inspected(tmp_path / "model", records)
    assert advice in str(refused.value) and "--chat_template_kwargs" not in str(refused.value)


def test_variables_that_are_no_truth_values_are_named(inspected, tmp_path):
    source = OPEN_THOUGHT_TEMPLATE.replace(
        "{{ '<|im_start|>assistant\n<think>\n' }}",
        "{{ '<|im_start|>assistant\n<think>\n' + ('\n</think>\n\n' if effort == 'none' else '') }}",
    )
    ready_models.write_ready(tmp_path / "model", "qwen3_vl", template=source)
    with pytest.raises(
        ConfigError, match=r"give values besides true and false to the template's variables \(effort\) by"
    ):
        inspected(tmp_path / "model", PLAIN)
    rows, _ = inspected(tmp_path / "model", PLAIN, "--chat_template_kwargs", '{"effort": "none"}')
    assert rows[0]["supervised_text"] == "A cat.<|im_end|>"


def test_earlier_answers_are_told_of(inspected, tmp_path):
    """Qwen3.5's template writes the empty thought before the last answer alone."""
    ready_models.write_ready(tmp_path / "model", "qwen3_5")
    turns = PLAIN[0]["messages"]
    twice = {"id": "2", "images": ["0.png"], "messages": [*turns, {"role": "user", "content": "Why?"}, turns[1]]}
    note = (
        "earlier answers of a conversation are learned after '<|im_end|>\\n<|im_start|>assistant\\n', as the chat "
        "template writes them, but generated after '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n"
        "</think>\\n\\n': --supervise_last_turn_only True learns the last ones alone"
    )
    assert note in inspected(tmp_path / "model", [twice])[1]
    assert note not in inspected(tmp_path / "model", [twice], "--supervise_last_turn_only", "True")[1]
    assert note not in inspected(tmp_path / "model", PLAIN)[1]


def test_a_single_record_without_a_variable_that_helps_is_told_what_does(folders):
    conversation = Transcript((Message("human", "What?"), Message("gpt", "A cat.")))
    open_one = check_of(folders, "qwen3_5", OPEN_THOUGHT_TEMPLATE)
    assert open_one.reason(conversation, ()).endswith("empty one learned): write its thought into the record")
    thinking = replace(conversation, messages=(conversation.messages[0], Message("gpt", "A cat.", thought="Hm.")))
    spaces = PromptCheck(Encoder(as_llava(tokenizer_of("sp_default")), EncodingOptions("mistral_zephyr", 4096)), IMAGES)
    assert spaces.reason(conversation, ()).endswith("is learned): give another --version")
    empty = check_of(folders, "qwen3_5", EMPTY_FOR_ALL)
    assert empty.reason(thinking, ()).endswith("(they begin differently): take the thought out")
    assert not empty.reason(conversation, ())


def test_a_language_models_own_template_is_checked_too(inspected, tmp_path):
    base = toys.write_base(tmp_path / "base")
    folder = Path(base["model_name_or_path"])
    (folder / "chat_template.jinja").write_text(REASONING_TEMPLATE.replace("<|im_end|>", "</s>"))
    flags = [token for name, value in base.items() if name != "model_name_or_path" for token in (f"--{name}", value)]
    own = [*flags, "--version", "chat_template"]
    with pytest.raises(ConfigError, match=r'give --chat_template_kwargs .\{"enable_thinking": false\}.'):
        inspected(folder, PLAIN, *own)
    rows, _ = inspected(folder, PLAIN, *own, "--chat_template_kwargs", json.dumps(OFF))
    assert rows[0]["supervised_text"] == "A cat.</s>"
    with pytest.raises(ConfigError, match="--version v1 is one of LLaVA's own templates"):
        inspected(folder, PLAIN, *flags, "--chat_template_kwargs", json.dumps(OFF))
    # Answers to compare with are no part of what is drawn, so that a policy may think before them.
    pytest.importorskip("llava_ds.extensions.rl")
    drawing = ("--objective", "grpo", "--reward_funcs", "exact")
    [row, *_], _ = inspected(folder, PLAIN, *own, *drawing)
    assert row["supervised_text"] == "A cat."
    asked = [token for token, label in zip(row["input_ids"], row["labels"]) if label == IGNORE_INDEX]
    tokenizer = read_parts(
        ModelArguments(model_name_or_path=str(folder), **{k: v for k, v in base.items() if k != "model_name_or_path"})
    ).open_tokenizer()
    assert tokenizer.decode([token for token in asked if token >= 0]).endswith("<think>\n")


@pytest.mark.parametrize(
    ("template", "name", "behind"),
    [
        ("v1", "llama_slow_legacy", " A red cat.</s>"),
        ("mpt", "neox", "A red cat.<|im_end|>"),
        ("chatml", "qwen", "A red cat.<|im_end|>\n"),
        ("llama_3", "llama3", "A red cat.<|eot_id|>"),
    ],
)
def test_answers_to_draw_are_asked_for_as_at_inference(template, name, behind):
    """LLaVA-NeXT learns headers, too, which no policy has to draw."""
    tokenizer = as_llava(tokenizer_of(name))
    talk = (Message("human", "<image>\nWhat?"), Message("gpt", "No."), Message("human", "Why?"))
    conversation = Transcript((*talk, Message("gpt", "A red cat.")))
    options = EncodingOptions(template, 4096, supervise_last_turn_only=True, answer_is_reference=True)
    encoder = Encoder(tokenizer, options)
    [learned] = encoder.encode_batch([(conversation, [3])])
    found = with_generation_prompt(encoder, conversation, [3], learned)
    prompt = encoder.prompt_ids(talk, [3])
    assert found.input_ids.tolist() == learned.input_ids.tolist()
    assert found.input_ids[: len(prompt)].tolist() == prompt and (found.labels[: len(prompt)] == IGNORE_INDEX).all()
    assert found.labels[len(prompt) :].tolist() == found.input_ids[len(prompt) :].tolist()
    assert text_of_ids(found.labels[len(prompt) :].tolist(), tokenizer) == behind
    short = replace(encoder.options, max_length=len(prompt) + 1)
    cut = with_generation_prompt(Encoder(tokenizer, short), conversation, [3], learned.cut(len(prompt) + 1))
    assert len(cut.input_ids) == len(prompt) + 1 and cut.truncated and cut.num_targets == 1
