"""What a person is shown is what the ids say."""

import re

from PIL import Image

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.tracking.data_page import ShownSample, in_terminal, page, runs_of, supervised_text


def coded(tokenizer) -> tuple[list[int], list[int]]:
    """Two answers and a picture, as the encoder writes them."""
    ids, labels = [], []
    for text, supervised in (("USER: ", 0), (None, 0), ("\nWhat is it? ASSISTANT:", 0), ("It is a cat.</s>", 1)):
        part = [IMAGE_TOKEN_INDEX] * 3 if text is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += part if supervised else [IGNORE_INDEX] * len(part)
    return ids, labels


def test_runs_hold_every_token_once_and_their_texts_are_the_samples(tokenizer):
    ids, labels = coded(tokenizer)
    runs = runs_of(ids, labels, tokenizer)
    assert sum(run.num_tokens for run in runs) == len(ids)
    assert [run.kind for run in runs] == ["context", "image", "context", "supervised"]
    assert runs[1] == type(runs[1])("image", 3, "")
    assert runs[3].text.strip() == "It is a cat.</s>" and "What is it? ASSISTANT:" in runs[2].text


def test_supervised_text_is_every_stretch(tokenizer):
    ids, labels = coded(tokenizer)
    assert supervised_text(ids, labels, tokenizer) == "It is a cat.</s>"
    assert supervised_text(ids + ids, labels + labels, tokenizer) == "It is a cat.</s>It is a cat.</s>"
    assert supervised_text(ids, [IGNORE_INDEX] * len(ids), tokenizer) == ""


def test_the_terminal_shows_what_is_supervised_with_and_without_colours(tokenizer):
    sample = ShownSample("a1 (x.json:3)", "12 tokens", runs_of(*coded(tokenizer), tokenizer), ())
    plain, coloured = in_terminal(sample, False), in_terminal(sample, True)
    assert plain.startswith("--- a1 (x.json:3) (12 tokens)\n") and "[3 image positions]" in plain
    assert re.search(r">>> ?It is a cat.</s><<<$", plain)
    assert re.search("\x1b\\[32m ?It is a cat.</s>\x1b\\[0m$", coloured)


def test_the_terminal_is_not_steered_by_the_data(tokenizer):
    ids = tokenizer("yes", add_special_tokens=False)["input_ids"]
    runs = (type(runs_of(ids, ids, tokenizer)[0])("context", 1, "a\x1b[2Jb\n"),)
    shown = in_terminal(ShownSample("t\x1b[2J\n", "n\x1b]0;\x07", runs, ()), False)
    assert shown == "--- t\\x1b[2J\\n (n\\x1b]0;\\x07)\na\\x1b[2Jb\n"


def test_the_page_needs_nothing_from_outside_and_escapes_the_data(tokenizer):
    sample = ShownSample("<b>a1</b>", "n", runs_of(*coded(tokenizer), tokenizer), (Image.new("RGB", (500, 20), "red"),))
    text = page(
        "data.json", ["1 <record>"], [sample], [{"file": "f", "line": 2, "index": 3, "id": "<i>", "reason": "<script>"}]
    )
    assert text.count("data:image/png;base64,") == 1 and not re.search(r"(src|href)=.?https?:", text)
    assert "<b>a1" not in text and "<script>" not in text and "1 &lt;record&gt;" in text and "f:2" in text
    assert re.search(r"<mark> ?It is a cat.&lt;/s&gt;</mark>", text)
    assert '<span class="image">3 image positions</span>' in text
