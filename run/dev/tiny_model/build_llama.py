"""Train the tiny Llama and its tokenizer on texts about scenes. Uses no images."""

# B documents, T tokens of the longest, K words mixed at a position, D width, V vocab

import dataclasses
import functools
import json
import math

import numpy as np
import torch
import torch.nn.functional as F
from tiny_model.muon import Optimizers
from tiny_model.texts import (
    NOTHING,
    STYLES,
    SYSTEM,
    Span,
    chat_document,
    choose_by_answer,
    describe,
    quiz_document,
)
from tiny_model.weights_half import save_half
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from llava_ds.tiny.build_tokenizer import MAX_LENGTH_TOKENS, save_tokenizer, train_tokenizer
from llava_ds.tiny.questions import KINDS, all_questions, caption
from llava_ds.tiny.scenes import sample_scene

WORDS_PER_POSITION = 4
EMBEDDING_STD = 0.3
DOCUMENT_KINDS = ("facts", "comparisons", "chat", "plain")
CURRICULUM = (  # (until this share of the steps, shares of DOCUMENT_KINDS); early comparisons delay learning the facts
    (0.27, (0.8, 0.0, 0.1, 0.1)),
    (0.43, (0.2, 0.0, 0.65, 0.15)),
    (1.0, (0.07, 0.4, 0.43, 0.1)),
)
BOS_ID, EOS_ID = 1, 2


@dataclasses.dataclass(frozen=True)
class LlamaRecipe:
    """Length and speed of the training."""

    num_steps: int = 1000
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    learning_rate: float = 1e-2  # embeddings, norms and output layer, AdamW
    muon_learning_rate: float = 2e-2
    quizzes_per_batch: int = 24
    chats_per_batch: int = 24
    turns_per_chat: int = 8
    plains_per_batch: int = 40
    num_corpus: int = 2000  # scenes whose texts the tokenizer learns from
    num_eval_per_kind: int = 200
    noise: float = 0.2  # on a patchwork's positions, relative to their size


def build_llama(folder, seed, recipe=LlamaRecipe()):
    """Train from a seed, write the folder that transformers opens, and return accuracy per kind of question."""
    rng = np.random.default_rng([seed, 20])
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(_corpus(np.random.default_rng([seed, 21]), recipe.num_corpus))
    encode = Encoder(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            max_position_embeddings=MAX_LENGTH_TOKENS,
            tie_word_embeddings=False,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=None,
        )
    )
    # At the usual 0.02, word embeddings are small compared with the layers' outputs, and learning starts slower.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    _train(model, encode, rng, recipe)
    save_llama(model, tokenizer, folder)
    return accuracy_by_kind(model.eval(), encode, np.random.default_rng([seed, 22]), recipe.num_eval_per_kind)


def save_llama(model, tokenizer, folder):
    """Write model and tokenizer as the folder that LlamaForCausalLM and AutoTokenizer open."""
    folder.mkdir(parents=True, exist_ok=True)
    save_half(model, folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)


def _train(model, encode, rng, recipe):
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    optimizers = Optimizers(model, matrices, recipe)
    bar = tqdm(range(recipe.num_steps), desc="llama")
    for step in bar:
        documents = _documents(rng, recipe, progress=step / recipe.num_steps)
        loss = _loss(model, collate([encode(d) for d in documents]), rng, recipe.noise)
        optimizers.step(loss, max_norm=1.0)
        bar.set_postfix(loss=f"{loss.item():.3f}")


def _documents(rng, recipe, progress):
    """Return the documents of a step: one kind and one style of description, so that their lengths are similar."""
    style = STYLES[int(rng.choice(len(STYLES), p=(0.8, 0.1, 0.1)))]
    shares = next(shares for until, shares in CURRICULUM if progress < until)
    kind = str(rng.choice(DOCUMENT_KINDS, p=shares))
    if kind == "chat":
        with_system = rng.random() < 0.25  # always the same words: costly to compute, quickly learned
        scenes = [sample_scene(rng) for _ in range(recipe.chats_per_batch)]
        return [chat_document(scene, rng, style, recipe.turns_per_chat, with_system) for scene in scenes]
    if kind == "plain":
        scenes = [sample_scene(rng) for _ in range(recipe.plains_per_batch)]
        return [[*describe(scene, rng, style), Span(caption(scene, rng) + "\n", 1.0)] for scene in scenes]
    scenes = [sample_scene(rng) for _ in range(recipe.quizzes_per_batch)]
    return [quiz_document(scene, rng, style, comparisons=kind == "comparisons") for scene in scenes]


def _loss(model, batch, rng, noise):
    """Weighted mean cross-entropy of the next token."""
    embeds = embed(model, batch)
    mixed = batch["is_patchwork"]
    scale = embeds[mixed].norm(dim=-1, keepdim=True) / math.sqrt(embeds.shape[-1])
    jitter = torch.from_numpy(rng.standard_normal((int(mixed.sum()), embeds.shape[-1]), dtype=np.float32))
    level = noise * torch.from_numpy(rng.random((int(mixed.sum()), 1), dtype=np.float32))
    embeds = embeds.index_put((mixed,), embeds[mixed] + jitter * level * scale.detach())
    hidden = model.model(inputs_embeds=embeds).last_hidden_state  # (B, T, D)
    weight = batch["weight"][:, 1:]
    learned = weight > 0
    logits = model.lm_head(hidden[:, :-1][learned])
    loss = F.cross_entropy(logits, batch["ids"][:, 1:, 0][learned], reduction="none")
    return (loss * weight[learned]).sum() / weight[learned].sum()


def embed(model, batch):
    """Return (B, T, D): per position, the weighted sum of its words' embeddings."""
    words = model.get_input_embeddings()(batch["ids"])  # (B, T, K, D)
    return (words * batch["mix"].unsqueeze(-1)).sum(-2)


class Encoder:
    """Converts spans to arrays; caches the ids of pieces of text."""

    def __init__(self, tokenizer):
        self.text = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, spans):
        """Return ids (T, K), mix (T, K), weight (T,) and is_patchwork (T,) as lists, <s> first."""
        rows, mixes, weights, patchwork = [[BOS_ID]], [[1.0]], [0.0], [False]
        for span in spans:
            if span.words:
                for position in span.words:
                    rows.append([self._word(word) for word, _ in position])
                    mixes.append([weight for _, weight in position])
                weights += [0.0] * len(span.words)
                patchwork += [True] * len(span.words)
            else:
                ids = self.text(span.text)
                rows += [[i] for i in ids]
                mixes += [[1.0]] * len(ids)
                weights += [span.weight] * len(ids)
                patchwork += [False] * len(ids)
        return rows, mixes, weights, patchwork

    def _word(self, word):
        (word_id,) = self.text(word)
        return word_id


def collate(documents):
    """Return a dict of padded tensors: ids (B, T, K) int64, mix (B, T, K), weight (B, T), is_patchwork (B, T) bool."""
    shape = len(documents), max(len(rows) for rows, _, _, _ in documents)
    ids = torch.zeros(*shape, WORDS_PER_POSITION, dtype=torch.int64)
    mix = torch.zeros(*shape, WORDS_PER_POSITION)
    weight, is_patchwork = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for b, (rows, mixes, weights, patchwork) in enumerate(documents):
        fill = [(0, 0.0)] * WORDS_PER_POSITION
        padded = [(list(zip(r, m, strict=True)) + fill)[:WORDS_PER_POSITION] for r, m in zip(rows, mixes, strict=True)]
        ids[b, : len(rows)] = torch.tensor([[i for i, _ in row] for row in padded])
        mix[b, : len(rows)] = torch.tensor([[m for _, m in row] for row in padded])
        weight[b, : len(rows)] = torch.tensor(weights)
        is_patchwork[b, : len(rows)] = torch.tensor(patchwork)
    return {"ids": ids, "mix": mix, "weight": weight, "is_patchwork": is_patchwork}


@torch.no_grad()
def accuracy_by_kind(model, encode, rng, num_per_kind, style="patchwork"):
    """Return {kind: share of held-out text questions whose answer has the highest logits token by token}."""
    result = {}
    for kind in KINDS:
        documents = []
        while len(documents) < num_per_kind:
            scene = sample_scene(rng, heldout=True)
            if questions := all_questions(scene, kind):
                q = choose_by_answer(questions, rng)
                description = [dataclasses.replace(span, weight=0.0) for span in describe(scene, rng, style)]
                question = [Span(f"\n{q.text(rng)} ASSISTANT:"), Span(f"{q.answer}</s>", 1.0)]
                documents.append([Span(f"{SYSTEM} USER: "), *description, *question])
        batch = collate([encode(d) for d in documents])
        predicted = model(inputs_embeds=embed(model, batch)).logits[:, :-1].argmax(-1)
        wrong = (predicted != batch["ids"][:, 1:, 0]) & (batch["weight"][:, 1:] > 0)
        result[kind] = 1 - wrong.any(1).float().mean().item()
    return result


def _corpus(rng, num_documents):
    """Yield texts that contain every word of the scenes' language."""
    for _ in range(num_documents):
        scene = sample_scene(rng)
        spans = chat_document(scene, rng, "listing", num_turns=6, with_system=True)
        yield " ".join(span.text for span in spans).replace("</s>", " ")
        yield caption(scene, rng)
        yield " ".join(NOTHING)
