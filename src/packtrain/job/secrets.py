"""Detect secrets in a job file. They belong in the environment: the file is copied into every run's folder."""

from __future__ import annotations

import re

INLINE = "looks like a secret; put it in an environment variable and list its name under `environment`"

_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key"
    r"|(^|_)token(_|$)|(auth|access|api|bearer|hf|hub)token"
)
# An argument may be called --eos-token: only tokens that grant access count.
_SECRET_ARGUMENT = re.compile(
    r"(^|_)(secret|passw(or)?d|passphrase|credentials?|api_?key|access_?key|private_?key)(_key)?$"
    r"|^token$|(^|_)(auth|access|api|bearer|bot|git|github|gitlab|hf|hub|login|session|wandb)_?token$"
)
# Prefixes of well-known keys and tokens, private keys, passwords and signatures in URLs.
_SECRET_VALUE = re.compile(
    r"(?<![A-Z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"
    r"|-----BEGIN [A-Z0-9 ]+-----"
    r"|(?<!\w)(gh[opsur]_|github_pat_|glpat-|hf_)[A-Za-z0-9_-]{20}"
    r"|(?<!\w)xox[a-z]-[A-Za-z0-9-]{8}"
    r"|(?<![\w-])sk-[A-Za-z0-9_-]{20}"
    r"|(?<!\w)AIza[A-Za-z0-9_-]{35}"
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{10,}\.eyJ"
    r"|://[^\s/?#@:]{0,256}:[^\s/?#@]{1,256}@"
    r"|[?&](?i:(access_)?token|api_?key|password|secret|sig|signature|x-amz-(signature|security-token))=[^&\s]"
)
# An AWS secret key is 40 characters without a mark, like many harmless digests: it counts only near a word of AWS.
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_AWS_WORD = re.compile(r"aws|amazon|secret|access.?key", re.IGNORECASE)
_OPTION_WITH_VALUE = re.compile(r"(?<![\w.-])--?([A-Za-z][\w.-]*)(?:=|\s+)[^\s$=-]")
_VARIABLE_WITH_VALUE = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=[^\s$]")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")


def _words(name: str) -> str:
    """Return `awsSecretKey`, `aws-secret.key` and `AWS_SECRET_KEY` as `aws_secret_key`."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def names_secret(name: str) -> bool:
    """True if the name of a key says that its value is a secret."""
    return _SECRET_NAME.search(_words(name)) is not None


def mentions_aws(text: str) -> bool:
    return _AWS_WORD.search(text) is not None


def has_plain_secret(text: str) -> bool:
    """True if a text contains a secret that is recognizable by its form alone."""
    return _SECRET_VALUE.search(text) is not None


def has_secret(text: str, beside_aws: bool = False) -> bool:
    """True if a text looks like a secret or contains one; `beside_aws` if a word of AWS is near it."""
    if has_plain_secret(text):
        return True
    if beside_aws or mentions_aws(text):
        for found in _AWS_SECRET.findall(text):
            if re.search("[a-z]", found) and re.search("[A-Z]", found) and re.search("[0-9]", found):
                return True
    written = (*_OPTION_WITH_VALUE.finditer(text), *_VARIABLE_WITH_VALUE.finditer(text))
    return any(_SECRET_ARGUMENT.search(_words(option[1])) for option in written)


def is_secret_argument(option: object, value: object) -> bool:
    """True if two neighbors in a list are an option for a secret and its value."""
    if not isinstance(option, str) or value is None or isinstance(value, (list, dict)):
        return False
    named = _OPTION.fullmatch(option)
    given = not str(value).startswith(("-", "$")) and str(value) != ""
    return named is not None and given and _SECRET_ARGUMENT.search(_words(named[1])) is not None
