"""Answer run/evaluate.py's questions in transformers: run/dev/ask_transformers.py MODEL IMAGES QUESTIONS.json

MODEL is a folder of transformers' InternVL; QUESTIONS.json is in LLaVA's format, with one question and one image in
each record. It uses nothing from llava_ds, and no AutoProcessor, because InternVL's needs torchvision. Prints the share
of answers that equal the reference, ignoring case and a final full stop.
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, InternVLForConditionalGeneration


@torch.inference_mode()
def main() -> None:
    """Answer all questions greedily, and print the share of correct answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("questions", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    processor = AutoImageProcessor.from_pretrained(args.model, backend="pil")
    model = InternVLForConditionalGeneration.from_pretrained(args.model, dtype="auto").eval()
    shown = f"<img>{'<IMG_CONTEXT>' * model.config.image_seq_length}</img>"
    records, right = json.loads(args.questions.read_text(encoding="utf-8")), 0
    for record in records:
        question, answer = (turn["value"] for turn in record["conversations"])
        content = [{"type": "image"}, {"type": "text", "text": question.removeprefix("<image>\n")}]
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text.replace("<IMG_CONTEXT>", shown), add_special_tokens=False, return_tensors="pt")
        image = Image.open(args.images / record["image"]).convert("RGB")
        inputs["pixel_values"] = processor(images=[image], return_tensors="pt")["pixel_values"].to(model.dtype)
        made = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        said = tokenizer.decode(made, skip_special_tokens=True)
        right += said.strip().removesuffix(".").lower() == answer.lower()
    print(f"{args.questions.name} in transformers: {right} of {len(records)} correct ({right / len(records):.3f})")


if __name__ == "__main__":
    main()
