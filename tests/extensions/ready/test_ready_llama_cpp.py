"""llama.cpp reads what --format gguf writes of a ready model: its greedy answers about images are transformers'.

make serve-check-gguf runs these, with the environment of xllamacpp in LLAMA_CPP.
"""

import base64
import io
import random

import numpy as np
import pytest
import ready_gguf
import ready_models
from extension_there import needs_extension
from launching import run_script
from llama_serving import GREEDY, WITH_LLAMA_CPP, serving
from PIL import Image
from transformers import AutoModelForImageTextToText

pytestmark = [*WITH_LLAMA_CPP, needs_extension("gguf")]
QUESTIONS = 20
CELL = 2 * ready_gguf.QWEN_PATCH  # pixels of a cell's side


def images_of(family: str, is_whole: bool) -> list[Image.Image]:
    """Images of noise. is_whole: of a size that is cut into whole cells or tiles as it is."""
    chosen, pixels, found = random.Random(0), np.random.default_rng(0), []
    for _ in range(QUESTIONS):
        width, height = (chosen.randint(CELL, 500) for _ in range(2))
        if is_whole and family.startswith("qwen"):
            width, height = (chosen.randint(2, 8) * CELL for _ in range(2))
        elif is_whole:  # the longer side is 3 tiles
            across, down = chosen.choice([(3, 1), (3, 2), (3, 3), (2, 3), (1, 3)])
            width, height = across * ready_models.SIDE, down * ready_models.SIDE
        found.append(Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8)))
    return found


def encoded(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("family", ready_gguf.FAMILIES)
def test_answers_about_images_are_transformers(family, is_whole, tmp_path):
    """Images of other sizes are counted only: llama.cpp resizes them differently."""
    source = ready_gguf.write_ready(tmp_path / "model", family)
    run_script("export.py", source, "--format", "gguf", "--output_dir", tmp_path / "gguf")
    model = AutoModelForImageTextToText.from_pretrained(source).eval()
    model.generation_config.eos_token_id = None
    with ready_gguf.sizes_of(family):
        processor = ready_models.open_processor(source, family)
    equal = 0
    with serving(tmp_path / "gguf", tmp_path / "server.log") as post:
        for image in images_of(family, is_whole):
            question = {"type": "text", "text": "What is it?"}
            talk = [{"role": "user", "content": [{"type": "image"}, question]}]
            text = processor.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
            with ready_models.openable():
                inputs = processor(text=[text], images=[[image]], return_tensors="pt")
            answer = model.generate(**inputs, max_new_tokens=GREEDY["n_predict"], do_sample=False, pad_token_id=0)
            expected = answer[0, inputs["input_ids"].shape[1] :].tolist()
            url = {"url": f"data:image/png;base64,{encoded(image)}"}
            content = [{"type": "image_url", "image_url": url}, question]
            prompt = post("/apply-template", {"messages": [{"role": "user", "content": content}]})["prompt"]
            given = {"prompt_string": prompt, "multimodal_data": [encoded(image)]}
            found = post("/completion", {"prompt": given, **GREEDY})
            assert found["tokens_evaluated"] == inputs["input_ids"].shape[1] or not is_whole
            equal += found["tokens"] == expected
    print(f"{family}, {'whole cells' if is_whole else 'any size'}: {equal} of {QUESTIONS} answers equal")
    assert equal == QUESTIONS or not is_whole
