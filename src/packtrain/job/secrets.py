"""Detect secrets in job files and in code. They belong in the environment: jobs and code are copied into the store."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import log2

_ADVICE = {  # by field of the job
    "data": "download the file and give its path instead",
    "report": "set MLFLOW_TRACKING_TOKEN instead, and list it under `environment`",
    "store": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
}

_REFERENCES = ("secrets", "store_secret", "pull_secrets")  # in `fleet`: names of what a cloud or cluster keeps

KEY_FOLDERS = {
    ".ssh", ".aws", ".azure", ".bluemix", ".databricks", ".docker", ".gcloud", ".gnupg", ".huggingface", ".irssi",
    ".kaggle", ".kube", ".oci", ".password-store", ".purple", ".terraform", ".terraform.d", ".vault",
}  # fmt: skip
"""Folders in which tools keep keys."""
# Files in which tools keep keys, in lower case. Sources: the signatures of gitrob and shhgit, and the places that the
# documentation of the tools names.
_KEY_FILES = (
    # environments and shells
    ".env", ".env.*", "*.env", "env.local", ".envrc", ".exports", ".extra", ".*_history", ".*history",
    ".*sh_profile",
    # keys and where they are kept
    "*.pem", "*.key", "*.p8", "*.p12", "*.pkcs12", "*.pfx", "*.ppk", "*.asc", "*.gpg", "*.pgp", "*.age", "*.jks",
    "*.jceks", "*.bks", "*.keystore", "*.keychain", "*.kwallet", "*.agilekeychain", "*.kdb", "*.kdbx", "*.psafe3",
    "*.bek", "*.fve", "*.tpm", "*.keytab", "*.ovpn", "*.tblk", "*.rdp", "*.mobileprovision", "*.pcap", "*.cscfg",
    "*.publishsettings", "*[._-]rsa", "*[._-]dsa", "*[._-]ecdsa", "*[._-]ed25519", "id_rsa*", "id_dsa*", "id_ecdsa*",
    "id_ed25519*", "keyring", "keystore", "otr.private_key", "wg[0-9].conf", "*.wgconf",
    # passwords and logins
    ".netrc", "_netrc", "*.netrc", ".authinfo*", ".pgpass", "pgpass.conf", ".my.cnf", ".mylogin.cnf", ".mongorc.js",
    ".htpasswd", "*.htpasswd", "htpasswd", "shadow", "proftpdpasswd", ".vault_pass*", ".vault-pass*", "vault_pass*",
    "*.vault_pass", ".dbshell", "dbeaver-data-sources.xml", ".ftpconfig", "filezilla.xml", "recentservers.xml",
    "sitemanager.xml", "sftp.json", "sftp-config.json", ".remote-sync.json", "webservers.xml", ".muttrc", ".msmtprc",
    ".esmtprc", ".fetchmailrc", "robomongo.json", "logins.json", "key[34].db", "keys.db", "login.keychain*",
    # clouds and clusters
    "kubeconfig*", "*.kubeconfig", ".kubeconfig", ".dockercfg", ".dockerconfigjson", "docker-config.json",
    "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".terraformrc", "terraform.rc", "credentials.tfrc.json",
    ".boto", ".s3cfg", ".passwd-s3fs", "passwd-s3fs", "rclone.conf", ".rclone.conf", ".mc",
    "application_default_credentials.json", "service-account*.json", "service_account*.json", "serviceaccount*.json",
    "*-service-account.json", "*-sa.json", "client_secret*.json", ".bluemix", "apikey.json", "ibmcloud*.json",
    ".softlayer", ".databrickscfg", ".snowsql", ".trc", ".tugboat", "accesskeys.csv", "accesskeys*.csv",
    "*_accesskeys.csv", "rootkey.csv", "credentials.csv", "new_user_credentials.csv", ".vault-token", ".vault_token",
    "vault.yml", "vault.yaml", "master.key", ".ngc",
    # registries, hosts of code, tools of the trade
    ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", "pip.conf", ".condarc", ".gem", ".git-credentials", ".gitcookies",
    ".hgrc", ".netlify", "hub", ".wandbrc", ".comet.config", ".neptune*", "kaggle.json", ".kaggle.json", "hf_token*",
    ".hf_token*", ".huggingface_token", "stored_tokens", ".openai*", ".anthropic*", ".cohere*", ".replicate*",
    ".mlflow-credentials", "heroku.json", ".circleci.yml", "nuget.config", "gradle.properties",
    "settings-security.xml", "database.yml", "database.yaml", "secret_token.rb", "knife.rb", "localsettings.php",
    "wp-config.php", "omniauth.rb", "carrierwave.rb", "salesforce.js", "mongoid.yml", "appsettings.*.json",
    ".streamlit-secrets.toml",
)  # fmt: skip
# Words of which one in its name makes a file that is no source code one with keys.
_KEY_WORDS = {
    "apikey", "apikeys", "auth", "cred", "creds", "credential", "credentials", "keytab", "passphrase", "passwd",
    "password", "passwords", "privatekey", "secret", "secrets", "token",
}  # fmt: skip
# `key` is a word of many names; these before it make it one that gives access.
_KEY_PAIRS = re.compile(
    r"(^|_)(access|account|api|app|auth|aws|azure|deploy|encryption|gcloud|gcp|google|host|openai|private|prod|root|sa|secret"
    r"|server|service|service_account|sign(ing)?|ssh|ssl|storage|tls|user|wandb)_?keys?(_|$)"
)
_SOURCE = (
    ".py", ".pyi", ".pyx", ".pxd", ".ipynb", ".sh", ".bash", ".zsh", ".fish", ".r", ".rmd", ".jl", ".c", ".cc",
    ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift",
    ".lua", ".pl", ".rb", ".m", ".f", ".f90", ".js", ".mjs", ".ts", ".cmake", ".proto", ".sql", ".md", ".rst",
    ".html", ".css",
)  # fmt: skip
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".ico", ".pdf")
_SOURCE_NAMES = (
    "makefile", "dockerfile*", "*.dockerfile", "containerfile*", "cmakelists.txt", "requirements*.txt",
    "constraints*.txt", "environment.yml", "environment.yaml", "pyproject.toml", "setup.cfg", "tox.ini", "license*",
    "readme*",
)  # fmt: skip

_API_KEY_LITERALS = (
    "sk-", "AIza", "k_live_", "npm_", "pypi-AgE", "SG.", "_v1_", "dapi", "hvs.", "hvb.", "ya29.", "r8_", "nvapi-",
    "gsk_", "xai-", "pplx-", "dckr_pat_", "tskey-", "glsa_", "pnu_", "pul-", "PMAK-", "ntn_", "lin_api_", "dp.pt.",
    "sntry", "shp", "sq0atp-", "xkeysib-", "rubygems_", "pscale_", "AKCp", "ops_eyJ", "lsv2_", "KGAT_", "LTAI",
    ":AA",
)  # fmt: skip
# Precise enough for source code: a kind of secret, and the form that its issuer gives it. Each form is searched for
# only in texts that contain one of its literals, which makes a scan of large texts fast. Sources: what issuers
# document, and the rules of gitleaks, detect-secrets and trufflehog.
_FORMS = {
    "a private key": (
        ("PRIVATE KEY", "AGE-SECRET-KEY-1", "PuTTY-User-Key-File-"),
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\s|\\+[nr])+"
        r"(?:[A-Za-z0-9+/=]{40}|(?:Proc-Type|Version|Comment): )|AGE-SECRET-KEY-1[0-9A-Z]{58}|PuTTY-User-Key-File-\d: ",
    ),
    "an AWS access key": (
        ("AKIA", "ASIA"),
        # The documentation of AWS uses keys that end in EXAMPLE.
        r"(?<![A-Za-z0-9+/])(?:AKIA|ASIA)(?![A-Z0-9]{9}EXAMPLE)[A-Z0-9]{16}(?![A-Za-z0-9+/])|(?<!\w)ABSK[A-Za-z0-9+/]{109}",
    ),
    "an AWS secret key": (
        ("ccess", "ACCESS", "aws", "AWS"),
        r"(?i:aws_?secret_?(?:access_?)?key|secret_?access_?key)[\"']?\s*[:=]\s*[\"']?"
        r"(?![A-Za-z0-9/+]{30}EXAMPLEKEY)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    "an AWS session token": (
        ("ession", "ESSION"),
        r"(?i:aws_?(?:session|security)_?token|(?<![a-z])session_?token)[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+]{100}",
    ),
    "a GitHub token": (
        ("gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_"),
        r"(?<!\w)(?:gh[oprsu]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{20})",
    ),
    "a GitLab token": (
        ("glpat-", "gldt-", "glrt-", "glptt-", "glcbt-", "gloas-", "glagent-", "glsoat-"),
        r"(?<!\w)gl(?:pat|dt|rt|ptt|cbt|oas|agent|soat)-[A-Za-z0-9_-]{20}",
    ),
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
        _API_KEY_LITERALS,
        r"(?<![\w-])sk-(?:(?:proj|svcacct|admin|or-v1|ant-[a-z]+[0-9]{2})-[A-Za-z0-9_-]{32}|[A-Za-z0-9]{32})"
        r"|(?<!\w)(?:AIza[A-Za-z0-9_-]{35}(?![\w-])|[sr]k_live_[A-Za-z0-9]{24}|npm_[A-Za-z0-9]{36}(?!\w)"
        r"|pypi-AgE[\w-]{50}|SG\.[\w-]{22}\.[\w-]{43}|do[opr]_v1_[a-f0-9]{64}|dapi[a-f0-9]{32}(?!\w)"
        r"|hvs\.[\w-]{24}"
        r"|ya29\.[\w-]{30}|r8_[A-Za-z0-9]{37}(?!\w)|nvapi-[\w-]{60}|wandb_v1_[\w-]{40}|tgp_v1_[\w-]{43}"
        r"|gsk_[A-Za-z0-9]{52}|xai-[A-Za-z0-9]{80}|pplx-[A-Za-z0-9]{48}|dckr_pat_[\w-]{27}|tskey-[a-z]+-\w+-[A-Za-z0-9]{20}"
        r"|glsa_[A-Za-z0-9]{32}_[a-fA-F0-9]{8}|pnu_[A-Za-z0-9]{36}(?!\w)|pul-[a-f0-9]{40}(?!\w)|PMAK-[a-f0-9]{24}-[a-f0-9]{34}"
        r"|ntn_[0-9]{11}[A-Za-z0-9]{35}|lin_api_[A-Za-z0-9]{40}|dp\.pt\.[A-Za-z0-9]{40}|sntryu_[a-f0-9]{64}|sntrys_eyJ[\w+/=]{40}"
        r"|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|sq0atp-[\w-]{22}|xkeysib-[a-f0-9]{64}|rubygems_[a-f0-9]{48}"
        r"|pscale_(?:tkn|oauth|pw)_[\w=.-]{32}|AKCp[A-Za-z0-9]{69}|ops_eyJ[A-Za-z0-9+/]{60}|hvb\.[\w-]{60}"
        r"|lsv2_(?:pt|sk)_[a-f0-9]{32}|KGAT_[a-f0-9]{32}|LTAI[A-Za-z0-9]{20}(?!\w)|[0-9]{8,10}:AA[\w-]{33}(?![\w-]))",
    ),
    "an Azure key": (("AccountKey=", "AccessKey="), r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/]{42,86}="),
    "a JSON web token": (("eyJ",), r"(?<![\w-])eyJ[\w-]{16,}\.eyJ[\w-]{16,}\.[\w-]{16}"),
    "a signed URL": (
        ("-Signature=", "-signature=", "-Security-Token=", "-security-token=", "sig="),
        r"[?&](?i:X-(?:Amz|Goog)-Signature=[0-9a-f]{32}|X-Amz-Security-Token=[\w%+/=-]{32}"
        r"|sig=[\w%+/-]{40,}(?:%3D|=))",
    ),
    "a login": (
        ("machine", "_authToken", "_auth", '"auth"', '"key"', "sshpass", "client-key-data"),
        r"(?m:^|[\"'])\s*machine\s+\S+\s+login\s+\S+\s+password\s+(?![<$%{])\S{3}"
        r"|(?<!\w)_auth(?:Token)?\s*=\s*(?=\S*[0-9])[\w+/=-]{20}|\"auth\":\s*\"(?=[^\"]*[0-9])(?=[^\"]*[A-Z])[A-Za-z0-9+/]{12,}={0,2}\""
        r"|\"key\":\s*\"[0-9a-f]{32}\"\s*\}|sshpass\s+-p\s*[\"']?(?![$<\"'])\S{4}|client-key-data:\s*[A-Za-z0-9+/]{40}",
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
# A value from a generator beside its name, as in a file of variables: `WANDB_API_KEY=...`, `"api_key": "..."`. The end
# of the name comes first: a search for whole names takes twenty times as long.
_ASSIGNED = re.compile(
    r"(?:ey|EY|oken|OKEN|ecret|ECRET|ass|ASS|assw(?:or)?d|ASSW(?:OR)?D)[\"']?\]?\s{0,3}(?:=>?|:|,)\s{0,3}"
    r"(?P<open>[\"']?)(?P<value>[A-Za-z0-9+/_=.~-]{16,200})(?P<end>[\"']|[;,\s]|$)"
)
_NAME_BEFORE = re.compile(r"[\w.-]{0,40}$")
_LEAST_BITS = 3.0  # per character; 16 random hexadecimal digits have about 3.4, words of a language about 3
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
    r"|://[^\s/?#@:]{0,256}:[^\s/?#@]{1,256}@|(?i:https?)://[^\s/?#@]{1,256}@"
    r"|[?&](?i:(access_?|auth_?|id_?|security_?)?token|api_?key|password|secret|sig|signature|key-pair-id"
    r"|awsaccesskeyid|googleaccessid|x-(amz|goog)-(signature|credential|security-token))=[^&\s]"
    r"|(?i:authorization)[\"']?\s*[:=]\s*[\"']?(?i:bearer|basic|token|apikey)\s+[\w.~+/=-]"
    r"|(?<!\w)(?i:bearer)\s+(?=[^\s\"']*[0-9])[\w.~+/=-]{8}"
    r"|(?<!\w)(?i:bearer)\s+[\w.~+/=-]{20}"
)
# An AWS secret key is 40 characters without a mark, like many harmless digests: it counts only near a word of AWS.
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])")
_AWS_WORD = re.compile(r"aws|amazon|secret|access.?key", re.IGNORECASE)
# Their values decide: `--key image` names a column, `-p 10` a number of steps.
_MAYBE_SECRET_ARGUMENT = re.compile("key|pass|p|pw|pwd|auth")
_OPTION_WITH_VALUE = re.compile(r"(?<![\w.-])--?([A-Za-z][\w.-]*)(?:=|\s+)([^\s$=-]\S*)")
_VARIABLE_WITH_VALUE = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=([^\s$]\S*)")
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
    if any(_assigns_secret(text, assigned) for assigned in _ASSIGNED.finditer(text)):
        return "a key or token next to its name"
    return None


def _assigns_secret(text: str, assigned: re.Match[str]) -> bool:
    """True if a name that gives access stands before a value that looks random, not like a word, a call or a path."""
    if assigned["open"] != assigned["end"] and (assigned["open"] or assigned["end"] in "\"'"):
        return False
    if not _looks_random(assigned["value"].rstrip("=")):
        return False
    start = assigned.start()
    beginning = _NAME_BEFORE.search(text[max(0, start - 40) : start])
    assert beginning is not None  # it may be empty
    name = re.match(r"[A-Za-z]+", text[start:])
    return name is not None and _SECRET_ARGUMENT.search(_words(beginning[0] + name[0])) is not None


def _looks_random(value: str) -> bool:
    # A name such as `tokens.api_key2` is made of words, each with a number at most.
    if all(re.fullmatch("[A-Za-z]*[0-9]{0,3}|[0-9]+", part) for part in re.split(r"[._/~-]", value)):
        return False
    return -sum(n / len(value) * log2(n / len(value)) for n in Counter(value).values()) >= _LEAST_BITS


def keeps_keys(name: str) -> bool:
    """True if tools keep keys in files of that name, whoever put it there."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in _KEY_FILES)


def suggests_keys(name: str) -> bool:
    """True if a word in the name of a file that is no source code says that it has a key."""
    words = _words(name)
    return (
        not is_source(name)
        and not name.lower().endswith(_PICTURES)
        and (bool(_KEY_WORDS & set(words.split("_"))) or _KEY_PAIRS.search(words) is not None)
    )


def is_source(name: str) -> bool:
    """True for a file that people write for a machine to run, compile or install from."""
    lower = name.lower()
    return lower.endswith(_SOURCE) or any(fnmatchcase(lower, pattern) for pattern in _SOURCE_NAMES)


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
    return any(_gives_secret(option[1], option[2]) for option in written)


def is_secret_argument(option: object, value: object) -> bool:
    """True if two neighbors in a list are an option for a secret and its value."""
    if not isinstance(option, str) or value is None or isinstance(value, (list, dict)):
        return False
    named = _OPTION.fullmatch(option)
    return named is not None and not str(value).startswith(("-", "$")) and _gives_secret(named[1], str(value))


def _gives_secret(name: str, value: str) -> bool:
    """True if an option or a variable of that name is for secrets, or may be and its value looks like one."""
    if _SECRET_ARGUMENT.search(_words(name)):
        return value != ""
    words = _words(name)
    if _MAYBE_SECRET_ARGUMENT.fullmatch(words) is None:
        return False
    # A password has digits or marks among its letters; a path, a word with a number or a time has not.
    text = value.strip("\"'")
    is_word = re.fullmatch(r"[A-Za-z_-]+[0-9]{0,3}", text) and words not in ("pass", "pw", "pwd")
    return (
        not is_word and re.fullmatch(r"(?=.*[A-Za-z])(?=.*[0-9!@#%^&*+~?])[^\s/.:,=()\[\]{}<>]{6,}", text) is not None
    )
