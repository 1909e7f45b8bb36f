"""Train complete vision-language models from transformers: their folders hold tower, connector and processor."""
