"""Ask a model about a picture: python run/chat.py --image photo.jpg --question "What is this?"

Without --question it asks you, and remembers the conversation.
"""

import argparse

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sample import Message
from llava_ds.distributed import exit_for_bad_input, quiet_libraries
from llava_ds.infer.generate import Prompt, answer
from llava_ds.infer.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", default="output/tiny-finetune", help="exported folder (default: %(default)s)")
    parser.add_argument("--image", help="picture that the conversation is about")
    parser.add_argument("--question", help="ask this, print the answer, and leave")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="longest answer (default: %(default)s)")
    args = parser.parse_args()

    quiet_libraries()
    loaded = load_model(args.model_path)
    images = () if args.image is None else (args.image,)
    messages: tuple[Message, ...] = ()
    while True:
        question = args.question or _ask()
        if question is None:
            return
        first = not messages
        text = f"{IMAGE_TOKEN}\n{question}" if first and images else question
        messages += (Message("human", text),)
        [reply] = answer(loaded, [Prompt(messages, images)], max_new_tokens=args.max_new_tokens)
        print(reply, flush=True)
        if args.question:
            return
        messages += (Message("gpt", reply),)


def _ask() -> str | None:
    """The next question from the keyboard; None at its end (Ctrl-D)."""
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            return None
        if question:
            return question


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, DataError) as error:
        exit_for_bad_input(error, "run/chat.py")
