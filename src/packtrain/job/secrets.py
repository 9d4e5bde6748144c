"""Detect secrets in job files and in code. They belong in the environment: jobs and code are copied into the store."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ADVICE = {  # by field of the job
    "data": "download the file and give its path instead",
    "store": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
}

_REFERENCES = ("secrets", "store_secret", "pull_secrets")  # in `fleet`: names of what a cloud or cluster keeps

# Precise enough for source code: a kind of secret, and the form that its issuer gives it. Nothing is guessed. Each form
# is searched for only in texts that contain one of its literals, which makes a scan of large texts fast.
_FORMS = {
    "a private key": (
        ("PRIVATE KEY", "AGE-SECRET-KEY-1", "PuTTY-User-Key-File-"),
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\+[nr])+"
        r"(?:[A-Za-z0-9+/=]{40}|(?:Proc-Type|Version|Comment): )|AGE-SECRET-KEY-1[0-9A-Z]{58}|PuTTY-User-Key-File-\d: ",
    ),
    "an AWS access key": (
        ("AKIA", "ASIA"),
        # The documentation of AWS uses keys that end in EXAMPLE.
        r"(?<![A-Za-z0-9+/])(?:AKIA|ASIA)(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}(?![A-Za-z0-9+/])",
    ),
    "an AWS secret key": (
        ("aws", "AWS"),
        r"(?:aws|AWS)(?i:_?secret_?(?:access_?)?key)[\"']?\s*[:=]\s*[\"']?"
        r"(?![A-Za-z0-9/+]{30}EXAMPLEKEY)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    "a GitHub token": (
        ("gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_"),
        r"(?<!\w)(?:gh[oprsu]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{20})",
    ),
    "a GitLab token": (("glpat-", "gldt-", "glrt-"), r"(?<!\w)gl(?:pat|dt|rt)-[A-Za-z0-9_-]{20}"),
    "a Hugging Face token": (
        ("hf_", "api_org_"),
        # Not a name such as 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, which is as long.
        r"(?<!\w)(?:hf|api_org)_(?!(?:[A-Z]{1,4}[a-z]{2,}[0-9]*)+(?!\w))[A-Za-z0-9]{34}(?!\w)",
    ),
    "a Slack token": (
        ("xox", "xapp-", "hooks.slack.com"),
        r"(?<!\w)xox[abceoprs]-(?:[0-9]-)?[0-9]{8,}-[A-Za-z0-9-]{6}|(?<!\w)xapp-[0-9]-[A-Z0-9]{9,}-[0-9]{8,}-"
        r"|hooks\.slack\.com/services/T[A-Z0-9]{7,}/B[A-Z0-9]{7,}/[A-Za-z0-9]{16}",
    ),
    "an API key": (
        ("sk-", "AIza", "k_live_", "npm_", "pypi-AgE", "SG.", "_v1_", "dapi", "hvs.", "ya29.", "r8_", "nvapi-"),
        r"(?<![\w-])sk-(?:(?:proj|svcacct|admin|or-v1|ant-[a-z]+[0-9]{2})-[A-Za-z0-9_-]{32}|[A-Za-z0-9]{32})"
        r"|(?<!\w)(?:AIza[A-Za-z0-9_-]{35}(?![\w-])|[sr]k_live_[A-Za-z0-9]{24}|npm_[A-Za-z0-9]{36}(?!\w)"
        r"|pypi-AgE[\w-]{50}|SG\.[\w-]{22}\.[\w-]{43}|do[opr]_v1_[a-f0-9]{64}|dapi[a-f0-9]{32}(?!\w)"
        r"|hvs\.[\w-]{24}"
        r"|ya29\.[\w-]{30}|r8_[A-Za-z0-9]{37}(?!\w)|nvapi-[\w-]{60}|wandb_v1_[\w-]{40})",
    ),
    "an Azure key": (("AccountKey=", "AccessKey="), r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/]{42,86}="),
    "a JSON web token": (("eyJ",), r"(?<![\w-])eyJ[\w-]{16,}\.eyJ[\w-]{16,}\.[\w-]{16}"),
    "a signed URL": (
        ("-Signature=", "-signature=", "-Security-Token=", "-security-token=", "sig="),
        r"[?&](?i:X-(?:Amz|Goog)-Signature=[0-9a-f]{32}|X-Amz-Security-Token=[\w%+/=-]{32}"
        r"|sig=[\w%+/-]{40,}(?:%3D|=))",
    ),
    "an authorization header": (
        ("uthorization", "AUTHORIZATION"),
        r"(?:[Aa]uthorization|AUTHORIZATION)[\"']?\s*[:=,]\s*[\"']?(?i:Bearer|Basic|Token) +"
        r"(?=[^\s\"']*[0-9])[\w.~+/-]{20}",
    ),
    "a password in a URL": (
        ("://",),
        # Not a placeholder, such as user:password@ or {user}:{password}@, nor a database for tests on this machine.
        r"(?<!\w)(?:https?|s?ftps?|s3|ssh|git|svn|smb|ldaps?|socks5h?|postgres(?:ql)?|mysql|mariadb|mongodb|rediss?|amqps?"
        r"|nats)(?:\+\w+)?://[\w.%+~-]{0,128}:(?![^\s@]{0,40}(?i:passw|pass@|pwd|secret|xxx|\.\.\.))"
        r"[\w.%!+~,;^-]{3,128}@(?!(?i:host|localhost|127\.|example|server))[A-Za-z0-9\[]",
    ),
}
_COMPILED_FORMS = {kind: (literals, re.compile(form)) for kind, (literals, form) in _FORMS.items()}

_GIVES_ACCESS = (
    "account|anthropic|api|aws|azure|bearer|bot|comet|deploy|gcp|git|github|gitlab|google|hf|hub|huggingface|login|mlflow|"
    "neptune|ngc|npm|oauth|openai|pypi|refresh|sas|security|service|session|sign(ing)?|slack|vault|wandb"
)
_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key|(^|_)(authorization|bearer)(_|$)"
    rf"|(^|_)token(_|$)|(auth|access|api|bearer|hf|hub)token|(^|_)({_GIVES_ACCESS})_?key$"
)
# An argument may be called --eos-token or --sort-key: only tokens and keys that give access count.
_SECRET_ARGUMENT = re.compile(
    r"(^|_)(secret|passw(or)?d|passphrase|credentials?|api_?key|access_?key|private_?key)(_key)?$"
    rf"|^(token|bearer|authorization)$|(^|_)(auth|access|{_GIVES_ACCESS})_?(token|key)$"
)
# Looser than the forms above: a job has no reason to contain anything like them.
_SECRET_VALUE = re.compile(
    r"(?<![A-Z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"
    r"|-----BEGIN [A-Z0-9 ]+-----"
    r"|(?<!\w)(gh[opsur]_|github_pat_|glpat-|hf_)[A-Za-z0-9_-]{20}"
    r"|(?<!\w)xox[a-z]-[A-Za-z0-9-]{8}"
    r"|(?<![\w-])sk-[A-Za-z0-9_-]{20}"
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{10,}\.eyJ"
    r"|://[^\s/?#@:]{0,256}:[^\s/?#@]{1,256}@"
    r"|[?&](?i:(access_?|auth_?|id_?|security_?)?token|api_?key|password|secret|sig|signature|key-pair-id"
    r"|awsaccesskeyid|googleaccessid|x-(amz|goog)-(signature|credential|security-token))=[^&\s]"
    r"|(?i:authorization)[\"']?\s*[:=]\s*[\"']?(?i:bearer|basic|token|apikey)\s+[\w.~+/=-]"
    r"|(?<!\w)(?i:bearer)\s+(?=[^\s\"']*[0-9])[\w.~+/=-]{8}"
    r"|(?<!\w)(?i:bearer)\s+[\w.~+/=-]{20}"
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


def secret_in(field: object) -> str:
    """Return what to say about a secret in that field of the job."""
    advice = _ADVICE.get(str(field), "put it in an environment variable and list its name under `environment`")
    return f"looks like a secret; {advice}"


def names_secret(name: str) -> bool:
    """True if the name of a key says that its value is a secret."""
    return _SECRET_NAME.search(_words(name)) is not None


def holds_secret(path: Sequence[object]) -> bool:
    """True if a name on the way to a field of the job says that its value is a secret.

    Below `fleet.KIND.secrets` are names of variables and where the cloud keeps their values, which the fleet checks;
    others name a secret of the cluster as a whole.
    """
    is_reference = len(path) > 2 and path[0] == "fleet" and path[2] in _REFERENCES
    return not is_reference and any(names_secret(str(step)) for step in path)


def mentions_aws(text: str) -> bool:
    return _AWS_WORD.search(text) is not None


def find_secret(text: str) -> str | None:
    """Return which secret a text contains, such as "a GitHub token": one that its form alone makes certain."""
    for kind, (literals, form) in _COMPILED_FORMS.items():
        if any(literal in text for literal in literals) and form.search(text):
            return kind
    return None


def has_plain_secret(text: str) -> bool:
    """True if a text of a job contains a secret that is recognizable by its form alone."""
    return _SECRET_VALUE.search(text) is not None or find_secret(text) is not None


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
