"""Generate answers for run/rl.py with vLLM, in vLLM's own environment: python run/vllm_server.py MODEL

MODEL is the folder of the initial model, in transformers' format. run/rl.py --vllm_server http://127.0.0.1:8765 then
sends prompts here and, before every step, the folder of its new weights; it has to be on this machine. The server
does not need llava_ds, only a vLLM that can reload weights from a path (0.32 was tried). It listens only on this
machine, where everybody can send requests and name folders of weights (docs/rl.md).
"""

import argparse
import base64
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answers:
    """One vLLM engine, used by one request at a time."""

    def __init__(self, model: str, options: dict) -> None:
        from vllm import LLM

        own = {
            "logprobs_mode": "processed_logprobs",  # computed at the sampling temperature, as in training
            "enable_prefix_caching": False,  # cached prefixes are of old weights
        }
        self.llm, self.lock = LLM(model=model, **{**own, **options}), threading.Lock()

    def load(self, request: dict) -> dict:
        """Handle {"folder"}: load the weights in a folder. Returns {}."""
        with self.lock:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": request["folder"]})
            self.llm.reset_prefix_cache()
        return {}

    def draw(self, request: dict) -> dict:
        """Handle {"prompts": [{"ids", "images"}], "seeds", "max_tokens", "sampling"}.

        Returns {"answers": a list per prompt of {"ids", "log_probs", "ended"}}. images: base64 files, in the order of
        the image tokens, one token per image; seeds: a list per prompt, one per answer; max_tokens: one per prompt;
        sampling: other fields of vLLM's SamplingParams.
        """
        from PIL import Image
        from vllm import SamplingParams

        prompts, rules = [], []
        for prompt, seeds, most in zip(request["prompts"], request["seeds"], request["max_tokens"]):
            images = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in prompt["images"]]
            one = {"prompt_token_ids": prompt["ids"], **({"multi_modal_data": {"image": images}} if images else {})}
            prompts += [one] * len(seeds)
            rules += [SamplingParams(seed=seed, max_tokens=most, logprobs=0, **request["sampling"]) for seed in seeds]
        with self.lock:
            found = iter(self.llm.generate(prompts, rules, use_tqdm=False))
        return {"answers": [[answer_of(next(found).outputs[0]) for _ in seeds] for seeds in request["seeds"]]}


def answer_of(output) -> dict:
    """Convert vLLM's CompletionOutput to a dict that JSON can represent."""
    ids = list(output.token_ids)
    log_probs = [of_token[i].logprob for of_token, i in zip(output.logprobs, ids)]
    return {"ids": ids, "log_probs": log_probs, "ended": output.finish_reason == "stop"}


def handler_of(answers: Answers) -> type[BaseHTTPRequestHandler]:
    """Return a handler of POST /draw and /load; errors are answered with status 500 and their text."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            work = {"/draw": answers.draw, "/load": answers.load}.get(self.path)
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = (200, json.dumps(work(request))) if work else (404, f"there is no {self.path}")
            except Exception as error:  # the client has to report it
                status, text = 500, f"{type(error).__name__}: {error}"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_) -> None:
            """Do nothing, to not log requests."""

    return Handler


def main() -> None:
    """Start the engine, then serve requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument(
        "--options", type=json.loads, default={}, help='arguments of vllm.LLM as JSON, like {"tensor_parallel_size": 2}'
    )
    args = parser.parse_args()
    answers = Answers(args.model, args.options)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), handler_of(answers))
    print(f"run/rl.py --vllm_server http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
