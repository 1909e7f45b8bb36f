"""Rules of attention and numbers of tokens by content: a pack computes what the textbook does."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import random_samples
import torch
import toys
import varlen
from packed_step import Tower
from transformers import AttentionInterface, AutoModelForCausalLM

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError
from llava_ds.data.collate import LoadedSample, collate
from llava_ds.extensions.plugin_slots import ProjectorKind
from llava_ds.extensions.plugins.attention_rule import AttentionRule, segments_of
from llava_ds.extensions.plugins.content_tokens import ContentTokens
from llava_ds.extensions.plugins.unproven import refuse_unproven
from llava_ds.geometry import media_layout
from llava_ds.model import attention, projector
from llava_ds.model.attention import Bounds, Rule, attend
from llava_ds.model.heads import LogProbs
from llava_ds.model.llava import LlavaModel
from llava_ds.model.projector import build_projector

OPTIONS = random_samples.SQUARE
TABLES = [  # of marks: rows see columns
    [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    [[1, 0, 1], [1, 1, 1], [1, 1, 1]],
    [[0, 1, 0], [1, 0, 1], [0, 0, 0]],
]


class ByTable(AttentionRule):
    """Marks by the tokens' ids."""

    def __init__(self, table: list[list[int]]) -> None:
        self.table = torch.tensor(table) > 0

    def marks(self, batch):
        return (batch.input_ids[0] // 7) % 3

    def sees(self, query, key):
        return self.table[query, key]


def mask_of(marks: torch.Tensor, starts: list[int], table: torch.Tensor) -> torch.Tensor:
    """Which tokens see which others, (T, T)."""
    samples = torch.bucketize(torch.arange(len(marks)), torch.tensor(starts[1:]), right=True)
    seen = (table[marks][:, marks] & (samples[:, None] == samples)).tril()
    return seen | torch.eye(len(marks), dtype=torch.bool)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_segments_are_the_rule_and_few(table):
    table, rng = torch.tensor(table) > 0, random.Random(0)
    for _ in range(50):
        lengths = [rng.randrange(1, 12) for _ in range(4)]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        marks = torch.tensor([rng.choice((0, 1, 1, 2)) for _ in range(starts[-1])])
        found = segments_of(marks, starts, lambda query, key: table[query, key])
        seen, row = torch.zeros(len(marks), len(marks), dtype=torch.bool), 0
        for queries, keys in zip(found.queries, found.positions.split(found.keys)):
            for query in range(queries):
                seen[row, keys[: len(keys) - queries + query + 1]] = True
                row += 1
        assert torch.equal(seen, mask_of(marks, starts, table))
        if table.all():
            assert found.queries == lengths == found.keys


@pytest.mark.parametrize("kernel", [*attention.KERNELS, attention.SEGMENTS])
def test_every_kernel_computes_the_rule(monkeypatch, kernel):
    varlen.install_documented(monkeypatch)
    monkeypatch.setattr(attention, "_choose", lambda *_: kernel)
    torch.manual_seed(0)
    starts, rule = [0, 9, 10, 31], Rule(0.3)
    query, key, value = (torch.randn(1, heads, starts[-1], 8) for heads in (4, 2, 2))
    batch = SimpleNamespace(input_ids=torch.randint(0, 50, (1, starts[-1])), cu_seqlens=torch.tensor(starts))
    own = ByTable(TABLES[1])
    bounds = own._bounds(batch, {})
    bounds = Bounds.of(bounds["cu_seqlens"], bounds["max_seqlen"], bounds["shared_prompts"])
    seen = mask_of(own.marks(batch), starts, own.table)
    expected = varlen.attend_by_mask(query, key, value, seen, rule)
    assert (attend(query, key, value, bounds, rule) - expected).abs().max() < 1e-6
    at = torch.tensor([0, 3, 8, 9, 15, 30])
    found = attend(query.index_select(2, at), key, value, bounds, rule, at)
    assert (found - expected.index_select(1, at)).abs().max() < 1e-6


def samples_of(lengths: tuple[int, ...] = (14, 30, 9)) -> list[LoadedSample]:
    """Samples with an image after two tokens, except for the last, and every third token supervised."""
    rng, found = random.Random(0), []
    for i, length in enumerate(lengths):
        layout = media_layout("image", ((9, 5),), 1, OPTIONS)
        shown = layout.num_tokens if i < len(lengths) - 1 else 0
        ids = torch.tensor([rng.randrange(3, 400) for _ in range(length)])
        ids[2 : 2 + shown] = IMAGE_TOKEN_INDEX
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[2 + shown :: 3] = ids[2 + shown :: 3]
        pixels = torch.full((1, 3, 4, 4), rng.randrange(1, 200), dtype=torch.uint8)
        found.append(LoadedSample(ids, labels, [(pixels, layout)] if shown else []))
    return found


class ByColour(Tower):
    """Features that depend on the image."""

    def forward(self, pixel_values: torch.Tensor, inputs: dict | None = None) -> torch.Tensor:
        colours = pixel_values.double().mean((1, 2, 3)).sin()[:, None, None]
        return (colours * torch.arange(1, 33).view(1, 4, 8) / 8).to(torch.get_default_dtype())


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(family: str, batch, change=None, attend: str | None = None) -> tuple[torch.Tensor, dict]:
    """The log-probabilities of a random model, and gradients."""
    torch.manual_seed(0)
    config = toys.language_model_config(family)
    language_model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register())
    model = LlavaModel(ByColour(), build_projector("linear", 8, config.hidden_size), language_model).train()
    if family == "llama":
        model.shorten_last_layer()
    if attend is not None:
        language_model.set_attn_implementation(attend)
        model.short_last_layer = False
    if change is not None:
        change(model)
    rows = model(batch, LogProbs())
    (rows * torch.arange(1.0, len(rows) + 1)).sum().backward()
    return rows.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(found, expected) -> None:
    (rows, gradients), (wanted_rows, wanted) = found, expected
    torch.testing.assert_close(rows, wanted_rows, rtol=1e-9, atol=1e-9)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_models_losses_and_gradients_under_a_rule(family):
    batch, own = collate(samples_of(), OPTIONS), ByTable(TABLES[1])
    seen = mask_of(own.marks(batch), batch.cu_seqlens.tolist(), own.table)

    def masked(module, query, key, value, attention_mask, scaling=None, **_):
        return varlen.attend_by_mask(query, key, value, seen, Rule(scaling)), None

    AttentionInterface.register("masked", masked)
    assert not seen.equal(mask_of(torch.zeros_like(own.marks(batch)), batch.cu_seqlens.tolist(), own.table | True))
    check_same(trained(family, batch, own.built), trained(family, batch, attend="masked"))


class Fewer(ContentTokens):
    """Keeps the first token of the first image, and the first two of others, doubled."""

    def __init__(self) -> None:
        pass

    def choose(self, model, batch, embeds):
        stays = torch.ones(embeds.shape[1], dtype=torch.bool)
        stays[3:6] = stays[18:20] = False
        return embeds * 2, stays


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_left_out_tokens_are_as_if_the_images_had_fewer_features(family):
    samples = samples_of()
    batch = collate(samples, OPTIONS)
    fewer = [
        dataclasses.replace(one, input_ids=one.input_ids[stays], labels=one.labels[stays])
        for one, stays in zip(samples, Fewer().choose(None, None, torch.ones(1, 53, 1))[1].split([14, 30, 9]))
    ]

    def doubled(model):
        plain = model.begin
        model.begin = lambda batch: (plain(batch)[0] * 2, {})

    expected = collate(fewer, OPTIONS)
    assert expected.input_ids.shape[1] == batch.input_ids.shape[1] - 5
    check_same(trained(family, batch, Fewer().built), trained(family, expected, doubled))


def test_left_out_tokens_come_before_a_rule():
    batch = collate(samples_of(), OPTIONS)

    def after(model):
        Fewer().built(model)
        ByTable(TABLES[0]).built(model)

    def before(model):
        ByTable(TABLES[0]).built(model)
        Fewer().built(model)

    check_same(trained("qwen3", batch, after), trained("qwen3", batch, Fewer().built))
    with pytest.raises(
        ConfigError, match="Fewer can't leave out tokens of cu_seqlens, max_seqlen, shared_prompts: give"
    ):
        trained("qwen3", batch, before)


@pytest.mark.parametrize("gone", [1, 2, 16])
def test_text_and_an_images_first_token_are_not_left_out(gone):
    class Wrong(Fewer):
        def choose(self, model, batch, embeds):
            return embeds, torch.arange(embeds.shape[1]) != gone

    with pytest.raises(ConfigError, match=r"Wrong.choose returned .* expected True for tokens of texts and for an im"):
        trained("qwen3", collate(samples_of(), OPTIONS), Wrong().built)


def test_what_a_layout_returns_has_its_shape():
    batch = collate(samples_of(), OPTIONS)

    class Short(Fewer):
        def choose(self, model, batch, embeds):
            return embeds[:, :-1], super().choose(model, batch, embeds)[1]

    class Numbers(ByTable):
        def marks(self, batch):
            return batch.input_ids

        def sees(self, query, key):
            return query * key

    class Wide(Numbers):
        marks = ByTable.marks

    for part, found in (
        (
            Short(),
            r"Short.choose returned \(float64 \(1, 52, .*, bool .*, expected embeddings \(1, 53, \d+\) and the tokens",
        ),
        (
            Numbers(TABLES[0]),
            r"Numbers.marks returned int64 \(1, 53\) on cpu, expected a mark of every token, int64 \(53,\)",
        ),
        (
            Wide(TABLES[0]),
            r"Numbers.sees returned int64 \(52,\) on cpu, expected bool in the arguments' shape, \(52,\)",
        ),
    ):
        with pytest.raises(ConfigError, match=found):
            trained("qwen3", batch, part.built)


@pytest.mark.parametrize(
    ("family", "objective", "axes", "reason"),
    [
        ("llama", "dpo", (), "--objective dpo uses further models without it: give sft"),
        ("llama", "sft", ("sequence_parallel_size",), "--sequence_parallel_size divides samples, layers or matrices"),
        ("mistral", "sft", (), "a window of 17 tokens counts others: give --model_max_length 17 at most"),
        ("stateful", "sft", (), "layers with a state pass it on to every later token"),
    ],
)
def test_what_is_not_proven_is_refused_with_the_reason(family, objective, axes, reason):
    args = SimpleNamespace(
        training=SimpleNamespace(objective=objective),
        data=SimpleNamespace(model_max_length=18),
        all_axes=[SimpleNamespace(flag=flag) for flag in axes],
    )
    stateful = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    config = stateful if family == "stateful" else toys.language_model_config(family)
    model = SimpleNamespace(text_config=config, architecture=None)
    with pytest.raises(ConfigError, match=reason):
        refuse_unproven("a rule of attention", SimpleNamespace(args=args, model=model), None)


class Widths(ProjectorKind):
    """A projector that appends tokens, or returns another width; option: which."""

    def stride(self, option):
        return 2

    def build(self, option, tower_width, width):
        class Wrong(torch.nn.Linear):
            def forward(self, features):
                found = super().forward(features[:, ::4])
                return torch.cat([found, found[:, :1]], 1) if option == "tokens" else torch.cat([found, found], 2)

        return Wrong(tower_width, width)


@pytest.mark.parametrize(("option", "shape"), [("tokens", r"\(2, 5, 6\)"), ("width", r"\(2, 4, 12\)")])
def test_a_projector_with_another_shape_is_refused(monkeypatch, option, shape):
    monkeypatch.setattr(projector, "_own_kind", lambda kind: (Widths(), option))
    built = projector.build_projector("own", 8, 6)
    with pytest.raises(ConfigError, match=rf"returned the shape {shape}, expected \(2, 4, 6\): 16 patches"):
        built(torch.zeros(2, 16, 8))
