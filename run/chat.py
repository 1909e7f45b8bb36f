"""Chat with a model about images: python run/chat.py --image photo.jpg --question "What is this?"

Without --question, chat in the terminal; /help lists the commands, /image shows the model another image.
--web starts a page on this machine, --serve an endpoint for OpenAI's clients. On several GPUs: deepspeed run/chat.py
--engine deepspeed.
"""

import argparse
import sys
from typing import Annotated

from llava_ds.config.bounds import Bounds, Count, NotNegative, Positive, Rate, number
from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.infer_flags import EngineOptions, Sampling, add_engine_flags, parse_engine_options
from llava_ds.runtime.command import Parser, begin, exit_with, given_path

WEB_PORT, API_PORT = 7860, 8000
Port = Annotated[int, Bounds(1, 65535)]
Seed = Annotated[int, Bounds(0, 2**63 - 1)]  # torch's

MOST_REQUESTS = 64  # default of --max_concurrent_requests


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add_engine_flags(parser)
    files = {"nargs": "+", "action": "extend", "default": [], "metavar": "PATH", "type": given_path}
    add("--image", "--image-file", help="images of the first question", **files)
    add("--video", help="videos of the first question", **files)
    add("--question", help="ask this, print the answer, and exit")
    add("--quiet", action="store_true", help="print answers only: no speed, no notes")
    add("--web", action="store_true", help="serve a page on this machine (needs the extra 'demo')")
    add(
        "--serve",
        action="store_true",
        help="serve an endpoint for OpenAI's clients on this machine (needs the extra 'serve' and a key in "
        "LLAVA_DS_API_KEY)",
    )
    add("--port", type=number(Port), help=f"port on 127.0.0.1 (default: {WEB_PORT} for --web, {API_PORT} for --serve)")
    add(
        "--max_concurrent_requests",
        type=number(Count),
        help=f"with --serve: most requests at once, waiting ones included; more are refused (default: {MOST_REQUESTS})",
    )
    defaults = Sampling()
    for name, kind, text in (
        ("max_new_tokens", Count, "longest answer in tokens"),
        ("temperature", Rate, "0: always the likeliest token; LLaVA's own chat uses 0.2"),
        (
            "top_p",
            Annotated[float, Bounds(0, 1, above=True)],
            "with a temperature: sample from the fewest likeliest tokens whose probabilities add up to this",
        ),
        ("top_k", NotNegative, "with a temperature: sample from this many of the likeliest tokens; 0: from all"),
        ("repetition_penalty", Positive, "above 1, tokens that the answer already has become less likely"),
    ):
        spellings = [f"--{name}"] + ["--max-new-tokens"] * (name == "max_new_tokens")
        default = getattr(defaults, name)
        add(*spellings, type=number(kind), default=default, help=f"{text} (default: %(default)s)")
    add("--seed", type=number(Seed), help="with a temperature: makes answers repeatable; absent: they differ each time")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # added by deepspeed's launcher
    args = parser.parse_args(argv)
    check_flags(args)
    parse_engine_options(args)
    return args


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for conflicting flags."""
    if args.web and args.serve:
        raise ConfigError("--web and --serve: give one, and start the other as another process, on another --port")
    given = [f"--{name}" for name in ("image", "video", "question") if getattr(args, name)]
    if args.web and given:
        raise ConfigError(f"{', '.join(given)}: with --web it is given on the page, leave it out")
    if args.max_concurrent_requests is not None and not args.serve:
        raise ConfigError("--max_concurrent_requests needs --serve: give that, or leave it out")
    if args.port is not None and not (args.web or args.serve):
        raise ConfigError("--port needs --web or --serve: give one of these, or leave it out")
    if args.serve and given:
        raise ConfigError(f"{', '.join(given)}: with --serve, requests set it: leave it out")


if __name__ == "__main__":
    begin("run/chat.py", reads=parse, ends_without_reader=True)


import contextlib
import dataclasses
import os
from functools import partial

from llava_ds.engine.process_group import init_ranks
from llava_ds.extensions.infer.chat import (
    Session,
    answer_for_rank_0,
    make_line_reader,
    print_note,
    read_media,
    release_other_ranks,
    run_conversation,
)
from llava_ds.extensions.infer.engines import load_for_inference
from llava_ds.runtime.ranks import Ranks, quiet_libraries


def main(argv: list[str]) -> None:
    args = parse(argv)
    options = parse_engine_options(args)
    sampling = Sampling(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sampling)})
    quiet_libraries()
    ranks = start(options)
    if args.web:
        from llava_ds.extensions.infer.web import import_gradio, serve

        import_gradio()  # report a missing package before a large model is loaded
    if args.serve:
        from llava_ds.extensions.infer.api import Limits, api_key, check_server_packages, serve_api

        check_server_packages()
        api_key()
    loaded = load_for_inference(args.model_path, options, ranks)
    if ranks is not None and not ranks.is_first:
        answer_for_rank_0(loaded)
        return
    if not args.quiet:
        for note in loaded.notes:
            print_note(f"[{note}]")
    name = os.path.basename(os.path.abspath(args.model_path))
    with release_other_ranks(loaded):
        if args.web:
            serve(loaded, name, sampling, args.port or WEB_PORT, args.quiet)
        elif args.serve:
            limits = Limits(args.max_concurrent_requests or MOST_REQUESTS)
            serve_api(loaded, name, sampling, args.port or API_PORT, limits, args.quiet)
        else:
            talk(Session(loaded, sampling, args.quiet), args)


def start(options: EngineOptions) -> Ranks | None:
    """Return this process's rank among those that share the model; None for a single process."""
    if options.engine == "deepspeed":
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for answers
            return init_ranks()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--engine hf runs in one process: start it with python, or give --engine deepspeed")
    return None


def talk(session: Session, args: argparse.Namespace) -> None:
    """Answer --question, or all questions typed in the terminal."""
    session.pending += [read_media("image", path, session.loaded) for path in args.image]
    session.pending += [read_media("video", path, session.loaded) for path in args.video]
    if args.question is not None:
        session.question(args.question)
    else:
        run_conversation(session, make_line_reader())


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/chat.py")
