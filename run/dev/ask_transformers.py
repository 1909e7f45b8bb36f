"""Ask a model in transformers what run/evaluate.py asks: run/dev/ask_transformers.py MODEL IMAGES QUESTIONS.json

QUESTIONS.json is in LLaVA's format, with one question and one image in each record. Nothing of llava_ds is used. Prints
the share of answers that equal the reference, ignoring case and a final full stop.
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


@torch.inference_mode()
def main() -> None:
    """Answer all questions greedily, and print the share of correct answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("questions", type=Path)
    args = parser.parse_args()
    processor = AutoProcessor.from_pretrained(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32).eval()
    records, right = json.loads(args.questions.read_text(encoding="utf-8")), 0
    for record in records:
        question, answer = (turn["value"] for turn in record["conversations"])
        content = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>\n")}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        image = Image.open(args.images / record["image"]).convert("RGB")
        inputs = processor(images=[image], text=text, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        said = processor.tokenizer.decode(made, skip_special_tokens=True)
        right += said.strip().removesuffix(".").lower() == answer.lower()
    print(f"{args.questions.name} in transformers: {right} of {len(records)} correct ({right / len(records):.3f})")


if __name__ == "__main__":
    main()
