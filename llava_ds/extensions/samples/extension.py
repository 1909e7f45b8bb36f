"""Register sample answers: generated at regular steps, printed, and written to samples.jsonl."""

import time

from llava_ds.data.step_plan import steps_between
from llava_ds.extensions.base import Extension, Hook, Measure, Phase
from llava_ds.extensions.samples.report import plain_question
from llava_ds.extensions.samples.sampled_answers import Decoding, answers, prompts_of
from llava_ds.files.jsonl import RowLog, rows_of
from llava_ds.runtime.ranks import gather, print_first
from llava_ds.train.evaluating.evals import is_at
from llava_ds.train.session import Session

FILE = "samples.jsonl"
MOST_SHOWN = 100  # characters of an answer that are printed


class SampleAnswers(Measure):
    """Answers the questions at evaluations. A resumed run drops answers after its checkpoint."""

    def __init__(self, session: Session) -> None:
        self._session = session
        plan, ranks = session.plan, session.ranks
        own, args, tokenizer = plan.args.own["samples"], plan.args, plan.model.tokenizer
        self._every = steps_between(own.sample_steps, plan.steps.num_steps)
        limits = own.sample_max_new_tokens, args.data.model_max_length
        self._decoding = Decoding(tokenizer, args.model.version, plan.images, *limits)
        prompts = []
        if (dataset := plan.evals.own.get("samples")) is not None:
            prompts = prompts_of(dataset, own.num_sample_questions, tokenizer, args.model.version)
        # Compare between ranks, because an image may be missing on one machine only.
        shown = set.intersection(*(set(part) for part in gather([prompt.index for prompt in prompts], ranks)))
        self._prompts = [prompt for prompt in prompts if prompt.index in shown]
        if ranks.is_first:
            path = plan.run_folder / FILE
            kept = [row for row in rows_of(path) if row["step"] <= plan.resumed_step]
            self._log, self._steps = RowLog(path, kept), {row["step"] for row in kept}

    def is_due(self, step: int, last: bool) -> bool:
        return bool(self._prompts) and self._every is not None and is_at(step, self._every, last)

    def was_done(self, step: int) -> bool:
        return step in self._steps

    def run(self, step: int) -> None:
        began, ranks = time.perf_counter(), self._session.ranks
        found = answers(self._session.runner, self._prompts, self._decoding, ranks)
        seconds = time.perf_counter() - began
        if not ranks.is_first:
            return
        shown, rows = ("id", "question", "images", "reference"), []
        for prompt, answer in zip(self._prompts, found):
            row = {name: getattr(prompt, name) for name in shown}
            rows.append({"step": step, **row, "answer": answer, "seconds": round(seconds, 3)})
        self._log.write(rows)
        print_first(f"step {step:,}: {len(rows)} sample questions are answered ({seconds:.1f} s)")
        for row in rows:
            answer, reference = (str(row[name])[:MOST_SHOWN] for name in ("answer", "reference"))
            question = " ".join(plain_question(row["question"]).split())[-MOST_SHOWN:]  # the last turn is at its end
            print_first(f"step {step:,}: [{question}] {answer!r}, the data say {reference!r}")


class AddSampleAnswers(Hook):
    """Adds the answers to evaluations."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        session.evaluation.measures.append(SampleAnswers(session))


extension = Extension(hooks=((Phase.EVALUATE, AddSampleAnswers),))
