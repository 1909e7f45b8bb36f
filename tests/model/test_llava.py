"""The composed model: samples laid end to end are the samples one by one, and the maths are transformers' LLaVA's."""

import pytest
import torch
import toys
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llava_ds import formats
from llava_ds.arguments import ModelArguments
from llava_ds.batch import Batch
from llava_ds.data.collator import collate
from llava_ds.data.dataset import EncodedDataset
from llava_ds.distributed import Ranks
from llava_ds.geometry import PictureOptions
from llava_ds.model.build import ModelPlan, build_model, plan_model
from llava_ds.model.llava import LlavaModel

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
    pictures = PictureOptions(spec.size, spec.patch_size, spec.mean, "pad")
    return toys.encoded(**data, tokenizer=plan.tokenizer, cache_dir=tmp_path_factory.mktemp("cache"), pictures=pictures)


def arguments(tmp_path_factory) -> ModelArguments:
    return ModelArguments(**toys.write_base(tmp_path_factory.getbasetemp() / "model_base"))


def batch_of(dataset: EncodedDataset, indices: list[int]) -> Batch:
    return collate([dataset[i] for i in indices], dataset.pictures)


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


def test_a_sample_does_not_see_its_neighbours(model, dataset):
    batch = batch_of(dataset, [0, 1, 2])
    first, second, _ = batch.cu_seqlens[:-1].tolist()
    everywhere = torch.arange(batch.input_ids.shape[1])
    with torch.no_grad():
        logits = model(batch, logits_at=everywhere)
        changed_ids = batch.input_ids.clone()
        changed_ids[0, first + 3 : second] = 7
        changed = Batch(**{**vars(batch), "input_ids": changed_ids})
        again = model(changed, logits_at=everywhere)
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
            vision_config=plan.vision_config.to_dict(),
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
            ids[0, batch.image_positions] = 3
            pixels = (batch.pixel_values.float() / 255 - torch.tensor(spec.mean).view(1, 3, 1, 1)) / torch.tensor(
                spec.std
            ).view(1, 3, 1, 1)
            expected = reference(input_ids=ids, pixel_values=pixels if len(batch.image_positions) else None).logits[0]
            found = model(batch, logits_at=torch.arange(ids.shape[1]))
            assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_the_tower_has_no_layer_behind_the_selected_one(model, plan):
    assert plan.vision_config.num_hidden_layers == 3
    assert len(model.vision_tower.clip.encoder.layers) == 2


def test_rotary_tables_stay_float32_in_bfloat16(plan, tmp_path_factory):
    config = {"zero_optimization": {"stage": 0}}
    half = build_model(plan, arguments(tmp_path_factory), config, torch.bfloat16, 0, RANKS)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.language_model.model.rotary_emb.inv_freq.dtype == torch.float32
