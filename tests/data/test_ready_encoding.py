"""Ready models: ids, labels and pixels are those of transformers' own processors."""

from functools import cache

import numpy as np
import pytest
import ready_models
import torch
from PIL import Image
from ready_models import FAMILIES, open_processor, write_ready
from toys import encoding_options
from transformers import AutoConfig

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.encode import end_markers
from llava_ds.data.images.decode import load_media, probe
from llava_ds.data.ready_encode import encoder_of
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.geometry import media_layout
from llava_ds.model.families.ready import READY
from llava_ds.model.plan import read_parts

SIZES = [(40, 70), (70, 40), (32, 32), (33, 31), (200, 20), (20, 200), (1, 1), (97, 96), (5, 90), (300, 300)]
WORDS = ["It is a red cat.", "two", "yes no", "  spaces  inside ", "日本。", "a\nline", "What?", "<b>it's</b>"]


@pytest.fixture(scope="module", params=FAMILIES)
def ready(request, tmp_path_factory):
    """A family's name, its folder, its processor and its own template's twin with marked answers."""
    folder = tmp_path_factory.mktemp(request.param)
    write_ready(folder, request.param)
    return request.param, folder, open_processor(folder, request.param)


@cache
def image(size) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def opened(folder):
    """The encoder and the image options of a folder."""
    parts = read_parts(ModelArguments(model_name_or_path=str(folder)))
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    options = parts.tower.image_options(args)
    tokenizer = parts.open_tokenizer()
    return encoder_of(tokenizer, encoding_options(template="processor", max_length=10**6), options), options, tokenizer


def conversations(number: int):
    """Generated conversations: our messages, the processor's, and the sizes of their images."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        ours, theirs, sizes = [], [], []
        if rng.random() < 0.3:
            text = WORDS[rng.integers(len(WORDS))]
            ours.append(Message("system", text))
            theirs.append({"role": "system", "content": [{"type": "text", "text": text}]})
        for _ in range(rng.integers(1, 4)):
            texts, parts = [], []
            for _ in range(rng.integers(0, 3)):
                size = SIZES[rng.integers(len(SIZES))]
                sizes.append(size)
                word = WORDS[rng.integers(len(WORDS))].strip()
                texts += [IMAGE_TOKEN, "\n" if rng.random() < 0.5 else " ", word]
                parts += [{"type": "image", "image": image(size)}, {"type": "text", "text": word}]
            if not parts:
                texts = [WORDS[rng.integers(len(WORDS))]]
                parts = [{"type": "text", "text": texts[0]}]
            answer = WORDS[rng.integers(len(WORDS))]
            ours += [Message("human", "".join(texts)), Message("gpt", answer)]
            theirs.append({"role": "user", "content": parts})
            theirs.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        yield ours, theirs, sizes


@pytest.mark.parametrize("number", [25, pytest.param(200, marks=pytest.mark.full)])
def test_ids_and_labels_are_the_processors(ready, number):
    """Of conversations with several images, one, or none, and system turns."""
    family, folder, processor = ready
    encoder, options, tokenizer = opened(folder)
    marked = ready_models.MARKED[family]
    talks = list(conversations(number))
    features = [[media_layout("image", (size,), 1, options).mark for size in sizes] for _, _, sizes in talks]
    found = encoder.encode_batch([(ours, marks) for (ours, _, _), marks in zip(talks, features)])
    image_id = tokenizer.convert_tokens_to_ids(options.tiling.image_token)
    for (_, theirs, _), coded in zip(talks, found):
        # The twin writes the same text, and says which of it is an answer.
        settings = {"tokenize": True, "return_dict": True}
        expected = processor.apply_chat_template(theirs, **settings)["input_ids"][0]
        twin = processor.apply_chat_template(
            theirs, chat_template=marked, return_assistant_tokens_mask=True, return_tensors="pt", **settings
        )
        assert twin["input_ids"][0].tolist() == list(expected)
        assert np.where(coded.input_ids == IMAGE_TOKEN_INDEX, image_id, coded.input_ids).tolist() == list(expected)
        learned = torch.as_tensor(twin["assistant_masks"])[0].bool().numpy()
        if family in ("smolvlm", "idefics3"):  # the space behind "Assistant:" is the answer's: nothing else writes it
            learned |= np.append(learned[1:], False) & (coded.labels != IGNORE_INDEX)
        assert np.array_equal(coded.labels != IGNORE_INDEX, learned)
        assert np.array_equal(coded.labels[learned], coded.input_ids[learned])


def test_prompts_are_the_processors(ready):
    family, folder, processor = ready
    encoder, options, tokenizer = opened(folder)
    for ours, theirs, sizes in conversations(10):
        marks = [media_layout("image", (size,), 1, options).mark for size in sizes]
        ids = np.array(encoder.prompt_ids(ours[:-1], marks))
        ids[ids == IMAGE_TOKEN_INDEX] = tokenizer.convert_tokens_to_ids(options.tiling.image_token)
        expected = processor.apply_chat_template(
            theirs[:-1], tokenize=True, return_dict=True, add_generation_prompt=True
        )
        assert ids.tolist() == list(expected["input_ids"][0])
    ends = {tokenizer.eos_token, ready_models.ENDS.get(family, tokenizer.eos_token)}
    assert set(tokenizer.convert_ids_to_tokens(end_markers("processor", tokenizer))) == ends


def test_pixels_are_the_processors(ready, tmp_path):
    """They are equal bit for bit, and layouts have their number without decoding."""
    _, folder, processor = ready
    _, options, _ = opened(folder)
    config = AutoConfig.from_pretrained(folder)
    kind = config.model_type
    images = processor.image_processor
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (images.image_mean, images.image_std))

    def as_tiles(found) -> torch.Tensor:
        pixels = found["pixel_values"]
        if "image_position_ids" in found:
            pixels = pixels[found["image_position_ids"].amin(-1) >= 0]
        return (pixels if pixels.ndim == 2 else pixels.reshape(-1, *pixels.shape[-3:])).float()

    for i, size in enumerate(SIZES):
        path = tmp_path / f"{i}.png"
        image(size).save(path)
        media = Media("image", (FileRef(str(path)),))
        sizes = probe(media, options)
        layout = media_layout("image", sizes, 1, options)
        tiles = load_media(media, sizes, layout, options)
        crops = {"crop_to_patches": True} if hasattr(processor.image_processor, "crop_to_patches") else {}
        plain = {"do_rescale": False, "do_normalize": False, **crops}
        expected = processor.image_processor(image(size), return_tensors="pt", **plain)
        cells = [layout.cells]
        assert torch.equal(READY[kind].processed(config, tiles.float(), cells), as_tiles(expected))
        normalised = (tiles.float() / 255 - mean) / std
        expected = processor.image_processor(image(size), return_tensors="pt", **crops)
        assert torch.equal(READY[kind].processed(config, normalised, cells), as_tiles(expected))
        assert layout.num_tiles == len(tiles)
        assert torch.equal(load_media(media, sizes, layout, options, [0]), tiles[:1])


def test_what_cannot_be_written_is_refused(ready):
    _, folder, _ = ready
    encoder, options, _ = opened(folder)
    mark = media_layout("image", ((40, 40),), 1, options).mark
    spelled = [Message("human", f"look: {options.tiling.image_token}"), Message("gpt", "a")]
    if options.tiling.image_token == IMAGE_TOKEN:
        spelled = [Message("human", f"<image> {IMAGE_TOKEN}"), Message("gpt", "a")]
    shown = [Message("human", "<image> what?"), Message("gpt", "<image>")]
    errors = encoder.encode_batch(
        [(spelled, [mark] * (options.tiling.image_token == IMAGE_TOKEN)), (shown, [mark] * 2)]
    )
    assert "image token" in str(errors[0])
    assert "images belong to questions" in str(errors[1])
    with pytest.raises(DataError, match="videos of ready models"):
        media_layout("video", ((40, 40),), 1, options)
