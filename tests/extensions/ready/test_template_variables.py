"""Variables of chat templates: as a flag, as the beginning of a template, and in the folder of a finished model."""

import json
from types import SimpleNamespace

import pytest
import ready_models
from transformers import AutoTokenizer

from llava_ds.config.arguments import ModelArguments
from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.model.open.model_plan import read_parts
from llava_ds.template_variables import (
    default_values,
    parse_variables,
    read_variables,
    set_variables,
    split_defaults,
    with_defaults,
)

CHAT = [{"role": "user", "content": "x"}]


def tokenizer_with(source: str) -> SimpleNamespace:
    return SimpleNamespace(chat_template=source, special_tokens_map={"bos_token": "<s>"}, name_or_path="model")


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """The folder of a model that reasons."""
    folder = tmp_path_factory.mktemp("reasoning")
    ready_models.write_ready(folder, "qwen3_5", template=ready_models.REASONING_TEMPLATE)
    return folder


@pytest.fixture
def tokenizer(ready):
    return read_parts(ModelArguments(model_name_or_path=str(ready))).open_tokenizer()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[true]", "it is a list"),
        ('"enable_thinking"', "it is a text"),
        ("null", "it is null"),
        ("{enable_thinking: false}", "Expecting property name enclosed in double quotes"),
        ('{"a": NaN}', "it says NaN, not a JSON number"),
        ('{"a": 1e999}', "Out of range float values are not JSON compliant"),
        ('{"a": 1, "a": 2}', "it names 'a' twice"),
        ('{"a": "\udcff"}', "it holds half a character"),
        ('{"a": "\\ud800"}', "it holds half a character"),
    ],
)
def test_a_flag_that_is_no_object_is_refused(text, why):
    with pytest.raises(ConfigError, match=r"--chat_template_kwargs .* can't be read as a JSON object") as refused:
        parse_variables(text)
    assert why in str(refused.value) and """write it like '{"enable_thinking": false}'""" in str(refused.value)


@pytest.mark.parametrize("depth", [70, 100_000])
def test_a_flag_that_is_nested_too_deeply_is_refused(depth):
    with pytest.raises(ConfigError, match="is nested deeper than 64 levels") as refused:
        parse_variables('{"a": ' + "[" * depth + "]" * depth + "}")
    assert len(str(refused.value)) < 500


def test_every_command_says_what_is_wrong_with_the_flag():
    with pytest.raises(ConfigError, match="--chat_template_kwargs 3 can't be read as a JSON object"):
        parse_arguments(["--chat_template_kwargs", "3"], to_train=False)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "range"])
def test_a_name_that_the_program_sets_is_refused(name):
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.content + bos_token }}{% endfor %}{{ shown }}")
    with pytest.raises(ConfigError, match=f"sets '{name}', but that is set for every conversation: leave it out"):
        set_variables(tokenizer, json.dumps({"shown": 1, name: 1}), "processor")


def test_a_name_that_the_template_does_not_read_is_refused_with_those_that_it_reads(tokenizer):
    with pytest.raises(ConfigError, match="sets 'thinking', but the chat template does not read it") as refused:
        set_variables(tokenizer, '{"thinking": false}', "processor")
    assert str(refused.value).endswith("the variables that it reads are enable_thinking")
    plain = tokenizer_with("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="it reads no variables"):
        set_variables(plain, '{"thinking": false}', "processor")


def test_llavas_own_templates_have_no_variables(tokenizer):
    with pytest.raises(ConfigError, match="--version v1 is one of LLaVA's own templates and has no variables"):
        set_variables(tokenizer, '{"enable_thinking": false}', "v1")
    assert set_variables(tokenizer, None, "v1") == []


def test_of_several_templates_none_is_chosen():
    several = tokenizer_with({"default": "{{ mood }}", "tool_use": "{{ tools }}"})
    with pytest.raises(ConfigError, match=r"has several chat templates \(default, tool_use\): leave one of them"):
        set_variables(several, '{"mood": 1}', "chat_template")
    assert set_variables(several, None, "chat_template") == []


def test_names_that_a_template_sets_itself_are_no_variables():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% set words = m.content %}{% endif %}{{ words }}{% endfor %}"
        "{% set mood = mood if mood is defined else 'calm' %}{% generation %}{{ mood }}{% endgeneration %}"
        "{% if depth and not loud %}{% for i in range(depth) %}{{ i }}{% endfor %}{% endif %}"
    )
    assert read_variables(source, tokenizer_with(source)) == {"mood", "depth", "loud"}


def test_variables_are_found_in_macros_and_not_what_is_set_around_them():
    source = (
        "{% macro shown(part, loud=volume) %}{{ count.value }}{{ part }}{{ mood }}{% set count.value = 1 %}"
        "{% endmacro %}"
        "{% set count = namespace(value=0) %}{% for m in messages if m.text %}{{ shown(m) }}{% endfor %}"
        "{%- if depth is not defined %}{%- set depth = 3 %}{%- endif %}{{ depth }}"
    )
    assert read_variables(source, tokenizer_with(source)) == {"mood", "volume", "depth"}


@pytest.mark.parametrize("source", ["{{ 'x' * 10 ** 12 }}", "{{ 9 ** 9 ** 9 }}", "{{ 'x' | center(10 ** 12) }}"])
def test_nothing_of_a_template_is_computed_to_find_them(source):
    assert read_variables(source + "{{ mood }}", tokenizer_with(source)) == {"mood"}


def test_a_template_that_can_not_be_read_is_refused():
    for source in ("{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"):
        with pytest.raises(ConfigError, match="model: the tokenizer's chat template can't be read: "):
            set_variables(tokenizer_with(source), '{"mood": 1}', "processor")


VALUES = {
    "numbers": [0, -2.5, 1e-7, 12345678901234567890],
    "words": "'q' \"q\" \\n {% raw %} %} }} {# #} 猫 😀\u2028\x85\x01\n",
    "truth": {"yes": True, "no": False, "nothing": None},
}
SOURCES = [
    "{{ numbers | tojson }}|{{ words | tojson }}|{{ truth | tojson }}",
    "\n\n  {% for name in truth %}{{ name }}\n{% endfor %}\n",
    "{% macro shown() %}[{{ words }}]{% endmacro %}  {{- shown() }}{% block end %}{{ numbers }}{% endblock %}",
    "   {%- set words = words if words is defined else 'none' %}{{ words }}",
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_with_its_values_renders_as_if_they_were_given(tokenizer, source):
    names = read_variables(source, tokenizer)
    values = {name: value for name, value in VALUES.items() if name in names}
    kept = with_defaults(source, values)
    assert default_values(kept) == values and split_defaults(kept)[1] == source
    expected = tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False, **values)
    assert tokenizer.apply_chat_template(CHAT, chat_template=kept, tokenize=False) == expected
    others = {name: "other" for name in values}  # an argument of the renderer wins
    given = tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False, **others)
    assert tokenizer.apply_chat_template(CHAT, chat_template=kept, tokenize=False, **others) == given
    assert with_defaults(kept, values) == kept


@pytest.mark.parametrize(
    "value",
    ["2 ** 2 ** 2", "lipsum.__globals__", "'x' | upper", "[cycler]", "range(9)", "(1, 2)", "'a' }}{{ 'b'", "1 %}"],
)
def test_only_literals_count_as_kept_values(value):
    """A template may be a stranger's, and nothing of it is computed outside of its own process."""
    source = f"{{%- if a is not defined %}}{{%- set a = {value} %}}{{%- endif %}}\n{{{{ a }}}}"
    assert split_defaults(source) == ({}, source)


def test_another_value_replaces_the_kept_one_and_says_so(tokenizer):
    asked = set_variables(tokenizer, '{"enable_thinking": false}', "processor")
    assert asked == ["chat template: enable_thinking = false"]
    assert set_variables(tokenizer, None, "processor") == asked  # as of a model that kept it
    [line] = set_variables(tokenizer, '{"enable_thinking": true}', "processor")
    assert line == (
        "chat template: enable_thinking = true (--chat_template_kwargs), instead of false in the model's own chat "
        "template"
    )
    assert default_values(tokenizer.chat_template) == {"enable_thinking": True}


def test_transformers_asks_under_the_kept_values(ready, tokenizer, tmp_path):
    set_variables(tokenizer, '{"enable_thinking": false}', "processor")
    tokenizer.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    asked = opened.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    before = AutoTokenizer.from_pretrained(ready)
    assert asked == before.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert asked.endswith("<think>\n\n</think>\n\n")
