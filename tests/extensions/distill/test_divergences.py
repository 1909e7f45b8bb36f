"""The divergences are TRL's: numbers that its functions gave; gradients are those of autograd of the same formula.

python tests/extensions/distill/test_divergences.py FOLDER    # of TRL's source: writes trl_divergences.json anew
"""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

FIXTURE = Path(__file__).with_name("trl_divergences.json")
KEPT, ROWS, VOCABULARY = 3, 4, 9
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
SOURCES = {
    "generalized_jsd_loss": "experimental/gkd/gkd_trainer.py",
    "_jsd_divergence": "experimental/server_distillation/server_distillation_trainer.py",
    "_add_tail_bucket": "experimental/server_distillation/server_distillation_trainer.py",
}


def trls_numbers(folder: Path) -> dict[str, object]:
    """Logits of a student and a teacher (ROWS, VOCABULARY), and TRL's divergences summed over the rows."""
    found: dict[str, object] = {"F": F, "torch": torch}
    for name, file in SOURCES.items():
        nodes = [node for node in ast.walk(ast.parse((folder / file).read_text())) if getattr(node, "name", "") == name]
        nodes[0].decorator_list = []
        exec(compile(ast.Module(nodes[:1], []), file, "exec"), found)
    torch.manual_seed(0)
    student, teacher = (torch.round(2 * torch.randn(ROWS, VOCABULARY), decimals=3) for _ in range(2))
    cases = []
    for beta in BETAS:
        for heat in (1.0, 0.7, 2.0):
            whole = found["generalized_jsd_loss"](student, teacher, beta=beta, temperature=heat, reduction="sum").item()
            logs = [(each / heat).log_softmax(1) for each in (student, teacher)]
            ids = logs[1].topk(KEPT, 1).indices
            parts = [found["_add_tail_bucket"](each.gather(1, ids), torch.ones_like(ids)) for each in logs]
            kept = found["_jsd_divergence"](parts[0][0], parts[1][0], beta=beta, support_mask=parts[0][1].bool())
            cases.append({"beta": beta, "temperature": heat, "whole": whole, "kept": kept.sum().item()})
    return {"student": student.tolist(), "teacher": teacher.tolist(), "cases": cases}


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(trls_numbers(Path(sys.argv[1])), indent=1) + "\n")
    sys.exit()


from llava_ds.extensions.distill import teacher as module  # noqa: E402

NUMBERS = json.loads(FIXTURE.read_text())


def textbook(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergences (rows,) of log-probabilities (rows, n), by the paper's equation 1."""
    p, q = teacher.exp(), student.exp()
    if beta in (0, 1):
        return (p * (teacher - student)).sum(1) if beta == 0 else (q * (student - teacher)).sum(1)
    mixed = (beta * p + (1 - beta) * q).log()
    return beta * (p * (teacher - mixed)).sum(1) + (1 - beta) * (q * (student - mixed)).sum(1)


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: f"{case['beta']}-{case['temperature']}")
def test_a_divergence_is_trls(case):
    student, teacher = (
        (torch.tensor(NUMBERS[name]) / case["temperature"]).log_softmax(1) for name in ("student", "teacher")
    )
    whole, _ = module.divergence(student, teacher, None, case["beta"])
    kept, _ = module.divergence(student, *teacher.topk(KEPT, 1), case["beta"])
    assert whole.sum().item() == pytest.approx(case["whole"], rel=1e-6, abs=1e-6)
    assert kept.sum().item() == pytest.approx(case["kept"], rel=1e-6, abs=1e-6)
    assert (kept <= whole + 1e-6).all()  # merged outcomes tell less


@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradients_of_chunks_are_the_textbooks(beta, kept, monkeypatch):
    """With a soft cap, a temperature, weights, the cross-entropy, and rows that the teacher's output layer lacks."""
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 12)
    generator, heat, cap, alpha, rows, known = torch.Generator().manual_seed(1), 0.7, 5.0, 0.3, 11, 13
    hidden, weight = (torch.randn(n, 6, generator=generator).requires_grad_() for n in (rows, 15))
    targets, weights = torch.randint(0, known, (rows,), generator=generator), torch.rand(rows, generator=generator)
    teacher = (2 * torch.randn(rows, known, generator=generator)).log_softmax(1)
    logs, ids = (teacher, None) if kept is None else teacher.topk(kept, 1)

    def given(part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logs[part], None if ids is None else ids[part]

    asked = module.Divergence(heat, known, given, row_weights=weights, beta=beta, sft_alpha=alpha)
    loss, (_, values, losses) = asked.by_row(hidden / heat, weight, targets, cap / heat)
    found = torch.autograd.grad(3 * loss, (hidden, weight))

    logits = cap * torch.tanh(hidden.double() @ weight.double().T / cap)
    pair = (logits / heat)[:, :known].log_softmax(1), teacher.double()
    if ids is not None:
        pair = [
            torch.cat([each.gather(1, ids), (1 - each.exp().gather(1, ids).sum(1, keepdim=True)).log()], 1)
            for each in pair
        ]
    wanted, plain = textbook(*pair, beta), F.cross_entropy(logits, targets, reduction="none")
    total = ((wanted + alpha * plain) * weights).sum()
    assert torch.allclose(values, wanted, rtol=1e-5, atol=1e-6) and torch.allclose(losses, plain, rtol=1e-6)
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    for own, other in zip(found, torch.autograd.grad(3 * total, (hidden, weight))):
        assert torch.allclose(own, other, rtol=1e-5, atol=2e-6)
