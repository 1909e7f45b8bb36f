"""Remove secrets from output: tokens and passwords in flags, settings, addresses and environment variables."""

import os
import re
from collections.abc import Mapping

HIDDEN = "<redacted>"
LEAST_CHARACTERS = 8  # minimum length of a variable's value to redact; a shorter one would match inside ordinary words

_SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# These match whole words of a name: --hub_token and api_key, but not tokens_per_micro_batch.
_SECRET_WORDS = {
    "token", "key", "keys", "apikey", "secret", "secrets", "password", "passwd", "passphrase", "credential",
    "credentials",
}  # fmt: skip
_PATTERNS = [
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), HIDDEN),  # user:password@, or token@
    (re.compile(r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-)[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    # Object stores' signatures in an address.
    (re.compile(r"(?i)(?<=[?&])((?:x-amz-)?(?:signature|credential|security-token)|sig|access_token|token)=[^&\s\"']+"),
     rf"\1={HIDDEN}"),
    (re.compile(r"(?i)\b(authorization:\s*(?:bearer|basic)\s+)\S+"), rf"\1{HIDDEN}"),
]  # fmt: skip


def redact(value: object, environ: Mapping[str, str] = os.environ) -> object:
    """Return a copy of a text, list or dict with every secret replaced by <redacted>.

    Secrets are: the value of a flag or key whose name has the word token, key, secret, password or credential; the
    value of an environment variable with one of these anywhere in its name; user and password in an address; and text
    that looks like a token of common services.
    """
    secrets = [
        text
        for name, text in environ.items()
        if _SECRET_VARIABLE.search(name)
        and len(text) >= LEAST_CHARACTERS
        and not text.startswith(("/", "./", "~"))  # the path of a key file
    ]
    return _redacted(value, sorted(secrets, key=len, reverse=True))  # longest first: one secret may contain another


def is_secret_name(name: str) -> bool:
    """Return True if a flag or key of this name holds a secret."""
    return any(word in _SECRET_WORDS for word in re.split(r"[^a-z0-9]+", name.lower()))


def _redacted(value: object, secrets: list[str]) -> object:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        for pattern, shown in _PATTERNS:
            value = pattern.sub(shown, value)
        return value
    if isinstance(value, Mapping):
        return {name: _of_name(str(name), each, secrets) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        found, before = [], ""
        for each in value:  # in a command line, a value follows its flag
            text = each if isinstance(each, str) else ""
            flag, equals, _ = text.partition("=")
            if text.startswith("--") and equals and is_secret_name(flag):
                found.append(f"{flag}={HIDDEN}")
            elif before.startswith("--") and "=" not in before and is_secret_name(before) and not text.startswith("--"):
                found.append(_of_name(before, each, secrets))
            else:
                found.append(_redacted(each, secrets))
            before = text
        return found
    return value


def _of_name(name: str, value: object, secrets: list[str]) -> object:
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
    return HIDDEN if is_plain and is_secret_name(name) else _redacted(value, secrets)
