"""A fake vLLM for run/vllm_server.py: answers depend on their seeds only, and requests are recorded."""

import importlib.util
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

from launching import ROOT

LOG_PROB = -0.5


@dataclass(frozen=True)
class SamplingParams:
    """The fields that the server gives, by vLLM's names."""

    seed: int
    max_tokens: int
    logprobs: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]


@dataclass
class LLM:
    """Every answer is one or more tokens below 300, by its seed, and an end if there is room for one."""

    model: str
    logprobs_mode: str
    enable_prefix_caching: bool
    max_model_len: int = 0
    asked: list[tuple[dict, SamplingParams]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def generate(self, prompts: list[dict], params: list[SamplingParams], use_tqdm: bool) -> list[SimpleNamespace]:
        self.asked += zip(prompts, params)
        return [SimpleNamespace(outputs=[self._output(one)]) for one in params]

    def _output(self, params: SamplingParams) -> SimpleNamespace:
        ids = [5 + (params.seed >> 3 * i) % 8 for i in range(1 + params.seed % 3)]
        ended = len(ids) < params.max_tokens
        ids = [*ids, params.stop_token_ids[0]] if ended else ids[: params.max_tokens]
        log_probs = [{i: SimpleNamespace(logprob=LOG_PROB)} for i in ids]
        return SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason="stop" if ended else "length")

    def collective_rpc(self, name: str, kwargs: dict) -> list[None]:
        assert name == "reload_weights"
        self.loaded.append(kwargs.pop("weights_path"))
        assert not kwargs
        return [None]

    def reset_prefix_cache(self) -> None: ...


@contextmanager
def serving(model: str):
    """Run the server's own code on the fake vLLM. Yields (address, the fake)."""
    spec = importlib.util.spec_from_file_location("vllm_server", ROOT / "run" / "vllm_server.py")
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    module, before = ModuleType("vllm"), sys.modules.get("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    sys.modules["vllm"] = module
    answers = server.Answers(model, {"max_model_len": 512})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), server.handler_of(answers))
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", answers.llm
    finally:
        listening.shutdown()
        listening.server_close()
        sys.modules.pop("vllm") if before is None else sys.modules.update(vllm=before)
