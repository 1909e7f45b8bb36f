"""An environment on toys, and a toy model that often ends its turns."""

from pathlib import Path

from safetensors.torch import load_file, save_file

GAME = '''
from PIL import Image


class Crops:
    """Texts and crops for three turns at most; rewards letters of the alphabet's first half."""

    def reset(self, record, seed):
        self.images, self.turn, self.seed = record["images"], 0, seed
        assert record["id"] and record["reference"]

    def step(self, answer):
        self.turn += 1
        reward = sum(c < "n" for c in answer.lower() if c.isalpha()) / 10
        if self.turn == 3 or len(answer) % 7 == 6:
            return None, reward, True
        image = self.images[0] if self.images else Image.new("RGB", (30, 40), (self.seed % 255, 2, 3))
        width, height = image.size
        crop = image.crop((0, 0, width // 2, height // (1 + self.turn)))
        text = "What is it? " * (len(answer) % 2 + 1)
        return {"text": text, "images": [crop] * (len(answer) % 3 < 2)}, reward, False

    def get_reward(self):
        return self.turn / 8


class Opens(Crops):
    """A first question of its own."""

    def reset(self, record, seed):
        super().reset(record, seed)
        return {"text": "Which? " + record["prompt"][-4:], "images": [*self.images, Image.new("L", (24, 24), seed % 200)]}


class Once:
    """The record's question, one turn, and no reward."""

    def reset(self, record, seed):
        return None

    def step(self, answer):
        return None, None, True
'''  # noqa: E501
END = 2  # the id that ends an answer


def end_often(folder: Path, weight: float = 4.2) -> None:
    """Raise the end marker's probability in a random Llama: one dimension of all embeddings is its alone."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings[:, 0], head[:, 0] = 2.0, 0.0
    head[END] = 0.0
    head[END, 0] = weight
    save_file(weights, path, metadata={"format": "pt"})
