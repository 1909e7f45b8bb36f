"""A Llama-like tokenizer, trained on the texts of the scenes: byte-pair merges, byte fallback, a leading dummy ▁."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "▁"  # Llama writes spaces as this mark
SPECIALS = ("<unk>", "<s>", "</s>")
MAX_LENGTH_TOKENS = 2048


def train_tokenizer(texts, max_vocab_size=1024):
    """Train a tokenizers.Tokenizer with Llama's legacy behaviour on an iterable of texts.

    Ids: <unk> 0, <s> 1, </s> 2, 256 bytes, then characters and merges. Every separately tokenized piece gets a leading
    ▁, as in the slow Llama tokenizer that LLaVA used.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = _normalizer()
    # Split words from punctuation while learning, so that "circle" is one token with and without a full stop.
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "removed"),  # line ends are left to their byte, as in Llama
            pre_tokenizers.Split(SPACE, "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    alphabet = [chr(code) for code in range(33, 127)] + [SPACE]
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab_size - len(SPECIALS) - 256, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]

    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    words = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {token: i for i, token in enumerate([*SPECIALS, *bytes_, *words])}
    merges = [tuple(merge) for merge in learned["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save_tokenizer(tokenizer, folder):
    """Write the tokenizer's files for AutoTokenizer.

    tokenizer_class is PreTrainedTokenizerFast, because transformers 5's Llama class would rebuild normalizer and merges
    by its own rules instead of reading tokenizer.json.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": MAX_LENGTH_TOKENS,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def _normalizer():
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
