"""Named model sizes for estimates. Imported before torch, so it must not import torch."""

SUPERVISED = 0.25  # share of supervised tokens assumed before the data is read; about 1/6 in LLaVA-1.5's data
LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
# Language models by the name of the LLaVA model built on them. The tower is CLIP-L/336; flags define the projector.
NAMED = {
    "llava-v1.5-7b": LLAMA_7B,
    "llava-v1.5-13b": {
        **LLAMA_7B, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40,
    },
    "llava-v1.6-mistral-7b": {
        **LLAMA_7B, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "llava-v1.6-34b": {
        **LLAMA_7B, "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60,
        "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000,
    },
    "llama-3-8b": {**LLAMA_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    "qwen2-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen2.5-14b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    },
    "qwen2-72b": {
        "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
    },
}  # fmt: skip
