"""No secret stands in what is written or printed, and what is none stays readable."""

import json

import pytest

from llava_ds.runtime.redact import HIDDEN, redact

PLANTED = "planted-4f1c2e77"
ENVIRON = {"HF_TOKEN": PLANTED, "MY_SSH_KEY": "/home/me/.ssh/key.pem", "API_KEY": "short", "HOME": "/home/somebody"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["train.py", "--hub_token", "abc", "--seed", "1"], ["train.py", "--hub_token", HIDDEN, "--seed", "1"]),
        (["--api-key=abc", "--bf16", "True"], [f"--api-key={HIDDEN}", "--bf16", "True"]),
        (["--wandb_key", "--bf16"], ["--wandb_key", "--bf16"]),  # the value is missing, not secret
        ({"comet": {"api_key": "abc", "enabled": True}}, {"comet": {"api_key": HIDDEN, "enabled": True}}),
        ({"password": 123456, "token": None, "secret": ""}, {"password": HIDDEN, "token": None, "secret": ""}),
        ("https://me:pass@host/x and s3://AKIA@bucket", f"https://{HIDDEN}@host/x and s3://{HIDDEN}@bucket"),
        ("https://h/x?X-Amz-Signature=12ab&part=1", f"https://h/x?X-Amz-Signature={HIDDEN}&part=1"),
        (f"no model {PLANTED}/x", f"no model {HIDDEN}/x"),
        ("hf_abcdefghijklmnopqrstuvwxyz01", HIDDEN),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
    ],
)
def test_secrets_are_hidden(value, expected):
    assert redact(value, ENVIRON) == expected


@pytest.mark.parametrize(
    "value",
    [
        {"tokens_per_micro_batch": 4096, "tokenizer": "x", "max_tokens": 5, "monkey": "donkey"},
        ["--tokens_per_micro_batch", "4096", "--image_folder", "/data/hf_pictures"],
        "/home/me/.ssh/key.pem is short, user@host: 3@5, sk-learn and mailto:me@x.org",
        {"steps": [1, 2.5, None, True]},
    ],
)
def test_what_is_no_secret_stays(value):
    assert json.dumps(redact(value, ENVIRON)) == json.dumps(value)
