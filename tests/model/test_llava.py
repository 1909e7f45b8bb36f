"""The composed model: samples laid end to end are the samples one by one, and the maths are transformers' LLaVA's."""

import dataclasses

import pytest
import torch
import toys
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.data.dataset import EncodedDataset
from llava_ds.engine.construct import build_model
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.layouts import MediaLayout
from llava_ds.model.heads import Logits, SummedLoss
from llava_ds.model.llava import LlavaModel, merge_features
from llava_ds.model.open import names as formats
from llava_ds.model.open.model_plan import ModelPlan, plan_model
from llava_ds.model.projector import Newline
from llava_ds.runtime.ranks import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))
SAMPLES = "itiittii"


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> ModelPlan:
    return plan_model(arguments(tmp_path_factory), 512)


@pytest.fixture(scope="module")
def model(plan, tmp_path_factory) -> LlavaModel:
    config = {"zero_optimization": {"stage": 0}}
    model = build_model(plan, arguments(tmp_path_factory), config, torch.float32, 0, RANKS)
    model.vision_tower.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def dataset(plan, tmp_path_factory) -> EncodedDataset:
    data = toys.write_data(tmp_path_factory.mktemp("data"), SAMPLES)
    spec = plan.images
    image_options = ImageOptions(spec.size, spec.patch_size, spec.mean, "pad")
    return toys.encoded(
        **data, tokenizer=plan.tokenizer, cache_dir=tmp_path_factory.mktemp("cache"), images=image_options
    )


def arguments(tmp_path_factory) -> ModelArguments:
    return ModelArguments(**toys.write_base(tmp_path_factory.getbasetemp() / "model_base"))


def batch_of(dataset: EncodedDataset, indices: list[int]) -> Batch:
    return collate([dataset[i] for i in indices], dataset.image_options)


def loss_and_gradients(model: LlavaModel, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
    return sum(losses), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def test_laid_end_to_end_equals_one_at_a_time(model, dataset):
    packed, packed_gradients = loss_and_gradients(model, [batch_of(dataset, list(range(8)))])
    single, single_gradients = loss_and_gradients(model, [batch_of(dataset, [i]) for i in range(8)])
    assert abs(packed - single) / single < 1e-5
    for name, gradient in single_gradients.items():
        assert gradient.abs().max() > 0, name
        assert (packed_gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_the_loss_is_what_the_data_sources_add_up_to(model, dataset):
    samples = [dataclasses.replace(dataset[i], source=source) for i, source in enumerate([2, 0, 2, 0])]
    loss, by_source = model(collate(samples, dataset.image_options), SummedLoss(3))
    for source in range(3):
        batch = collate([sample for sample in samples if sample.source == source], dataset.image_options)
        assert by_source[0, source].item() == pytest.approx(model(batch).item(), rel=1e-5)
        assert by_source[1, source] == len(batch.targets)
    assert by_source[0].sum().item() == pytest.approx(loss.item(), rel=1e-6)
    assert loss.requires_grad and not by_source.requires_grad
    assert torch.equal(loss, model(collate(samples, dataset.image_options)))


def test_samples_that_share_images_give_what_copies_give(model, dataset):
    def copied(one: LoadedSample) -> LoadedSample:
        return dataclasses.replace(one, media=[(tiles.clone(), layout) for tiles, layout in one.media])

    shared = [one for i in range(4) for one in (dataset[i],) * 2]
    copies = [copied(one) for one in shared]
    once, twice = (collate(samples, dataset.image_options) for samples in (shared, copies))
    assert len(twice.pixel_values) == 2 * len(once.pixel_values) > 2
    assert torch.allclose(model.embed(once), model.embed(twice), atol=1e-6)
    loss, gradients = loss_and_gradients(model, [once])
    loss_of_copies, gradients_of_copies = loss_and_gradients(model, [twice])
    assert loss == pytest.approx(loss_of_copies, rel=1e-6)
    for name, gradient in gradients_of_copies.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-6), name


def test_a_sample_does_not_see_its_neighbours(model, dataset):
    batch = batch_of(dataset, [0, 1, 2])
    first, second, _ = batch.cu_seqlens[:-1].tolist()
    everywhere = torch.arange(batch.input_ids.shape[1])
    with torch.no_grad():
        logits = model(batch, Logits(everywhere))
        changed_ids = batch.input_ids.clone()
        changed_ids[0, first + 3 : second] = 7
        changed = Batch(**{**vars(batch), "input_ids": changed_ids})
        again = model(changed, Logits(everywhere))
    assert not torch.equal(logits[first + 3 : second], again[first + 3 : second])
    assert torch.equal(logits[second:], again[second:])
    assert torch.equal(logits[: first + 3], again[: first + 3])  # nor does a token see those behind it


@pytest.mark.parametrize("indices", [[1], [1, 4], []], ids=["one text", "two texts", "nothing at all"])
def test_batches_without_pictures_give_the_projector_a_zero_gradient(model, dataset, indices):
    _, gradients = loss_and_gradients(model, [batch_of(dataset, indices)])
    for name, gradient in gradients.items():
        if name.startswith("projector") or not indices:
            assert gradient.abs().max() == 0, name
    assert (gradients["language_model.lm_head.weight"].abs().max() > 0) == bool(indices)


def test_logits_equal_those_of_transformers_llava(model, plan, dataset):
    spec = plan.images
    reference = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=plan.tower.config.to_dict(),
            text_config=plan.text_config.to_dict(),
            image_token_index=3,
            vision_feature_layer=-2,
            image_seq_length=spec.num_tokens,
        )
    ).eval()
    ours = {formats.to_hf(name): parameter for name, parameter in model.named_parameters()}
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, tensor in ours.items():
            name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
            name = name.replace("vision_tower.vision_model.", "model.vision_tower.")
            theirs[name.replace("multi_modal_projector", "model.multi_modal_projector", 1)].copy_(tensor)
        for index in (0, 1, 2):
            batch = batch_of(dataset, [index])
            ids = batch.input_ids.clone()
            ids[0, batch.placing.positions] = 3
            pixels = (batch.pixel_values.float() / 255 - torch.tensor(spec.mean).view(1, 3, 1, 1)) / torch.tensor(
                spec.std
            ).view(1, 3, 1, 1)
            expected = reference(input_ids=ids, pixel_values=pixels if len(batch.placing.positions) else None).logits[0]
            found = model(batch, Logits(torch.arange(ids.shape[1])))
            assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def unpadding(plan, tmp_path_factory) -> tuple[LlavaModel, ImageOptions]:
    """A model with a newline, and what it is shown: pictures in tiles, pooled frames."""
    args = dataclasses.replace(arguments(tmp_path_factory), mm_patch_merge_type="spatial_unpad")
    model = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    model.vision_tower.requires_grad_(False)
    spec = plan.images
    ratio, merge = "anyres_max_1", "spatial_unpad"
    return model, ImageOptions(spec.size, spec.patch_size, spec.mean, ratio, merge_type=merge, newline_position="frame")


def sample_of(layouts: list[MediaLayout], size: int) -> LoadedSample:
    ids = [1, *[token for layout in layouts for token in [-200] * layout.num_tokens + [7, 8]]]
    tiles = [torch.randint(256, (layout.num_tiles, 3, size, size), dtype=torch.uint8) for layout in layouts]
    return LoadedSample(torch.tensor(ids), torch.tensor([max(i, -100) for i in ids]), list(zip(tiles, layouts)))


def test_features_newlines_and_pooled_features_stand_where_their_layouts_say(unpadding):
    model, options = unpadding
    shown = [
        [media_layout("image", ((70, 30),), 1, options)],
        [],
        [media_layout("frames", ((9, 9),) * 3, 2, options), media_layout("image", ((70, 30),), 2, options)],
        [media_layout("image", ((90, 90),), 1, options)],
    ]
    samples = [sample_of(layouts, options.size) for layouts in shown]
    assert any(len(layout.pool_index) for layouts in shown for layout in layouts)
    with torch.no_grad():
        embeds = model.embed(collate(samples, options))[0]
        for sample, found in zip(samples, embeds.split([len(sample.input_ids) for sample in samples])):
            expected = [torch.zeros(0, found.shape[1])]
            for tiles, layout in sample.media:
                features = model.image_features(tiles).flatten(0, 1)
                weights = torch.tensor(layout.pool_weight)[..., None]
                pooled = (features[torch.tensor(layout.pool_index)] * weights).sum(1)
                table = torch.cat([features, model.newline.embedding[None], pooled])
                expected.append(table[torch.tensor(layout.rows)])
            torch.testing.assert_close(found[sample.input_ids == -200], torch.cat(expected))


def test_the_newline_has_a_zero_gradient_where_it_is_not_shown_and_an_exact_one_where_it_is(unpadding):
    model, options = unpadding
    text = LoadedSample(torch.tensor([1, 5, 6]), torch.tensor([1, 5, 6]), [])
    for samples in ([text], []):
        _, gradients = loss_and_gradients(model, [collate(samples, options)])
        assert gradients["newline.embedding"].abs().max() == gradients["projector.layers.0.weight"].abs().max() == 0
    # Two thousand equal gradients: added up one by one in bfloat16 they would stop at 256.
    newline = Newline(4).to(torch.bfloat16)
    newline(torch.zeros(0, 4, dtype=torch.bfloat16), 2048).sum().backward()
    assert newline.embedding.grad.tolist() == [2048.0] * 4


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_are_placed_in_at_most_five_operations_none_of_which_asks_the_host(model, dataset, dtype):
    batch = batch_of(dataset, list(range(8)))
    features = model.image_features(batch.pixel_values).to(dtype)
    embeds = model.language_model.get_input_embeddings()(batch.input_ids)
    with Operations() as seen:
        merge_features(embeds, features, batch.placing, None)
    assert set(seen.names) <= {"view", "index_select", "unsqueeze", "_to_copy", "index_copy"} and len(seen.names) <= 5


def test_the_tower_has_no_layer_behind_the_selected_one(model, plan):
    assert plan.tower.config.num_hidden_layers == 3
    assert len(model.vision_tower.tower.encoder.layers) == 2


def test_rotary_tables_stay_float32_in_bfloat16(plan, tmp_path_factory):
    config = {"zero_optimization": {"stage": 0}}
    half = build_model(plan, arguments(tmp_path_factory), config, torch.bfloat16, 0, RANKS)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
