"""Score an exported model on held-out questions: python run/evaluate.py --model_path output/tiny-finetune

Without --data_path it asks about the generated scenes that no training picture shows.
"""

import argparse
import json
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sources import read_samples
from llava_ds.distributed import exit_for_bad_input, quiet_libraries
from llava_ds.infer.evaluate import accuracy_by_kind, questions_of, table, without_image
from llava_ds.infer.generate import answer
from llava_ds.infer.load import load_model
from llava_ds.tiny.default import heldout_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="output/tiny-finetune", help="exported folder (default: %(default)s)")
    parser.add_argument("--data_path", help="LLaVA-format JSON with reference answers; 'kind' groups the scores")
    parser.add_argument("--image_folder", help="folder that the image paths are relative to")
    parser.add_argument("--cache_dir", default="~/.cache/llava_ds", help="where the generated scenes are kept")
    parser.add_argument("--compare_without_image", action="store_true", help="ask again with the pictures withheld")
    parser.add_argument("--batch_size", type=int, default=48, help="questions at a time (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="longest answer (default: %(default)s)")
    parser.add_argument("--output", help="write scores and every answer to this JSON file")
    args = parser.parse_args()

    quiet_libraries()
    loaded = load_model(args.model_path)
    data_path, image_folder = args.data_path, args.image_folder
    if data_path is None:
        data_path, image_folder = heldout_data(args.cache_dir)
    questions = questions_of(read_samples(data_path, image_folder))
    asked = {"with picture": questions}
    if args.compare_without_image:
        asked["without picture"] = [without_image(question) for question in questions]

    answers = {
        name: answer(
            loaded,
            [question.prompt for question in these],
            batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens,
            progress=name,
        )
        for name, these in asked.items()
    }
    scores = {name: accuracy_by_kind(questions, given) for name, given in answers.items()}
    print(f"accuracy of {args.model_path} on {data_path}:")
    print(*table(scores), sep="\n")
    if args.output is not None:
        rows = [
            {"id": q.id, "kind": q.kind, "reference": q.reference, **{name: answers[name][i] for name in answers}}
            for i, q in enumerate(questions)
        ]
        Path(args.output).write_text(json.dumps({"scores": scores, "answers": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        exit_for_bad_input(error, "run/evaluate.py")
