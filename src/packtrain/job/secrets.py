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
    ".aliyun", ".aws", ".azure", ".bluemix", ".databricks", ".docker", ".doctl", ".gcloud", ".gnupg", ".huggingface",
    ".irssi", ".kaggle", ".kube", ".lambda_cloud", ".m2", ".mc", ".ngc", ".oci", ".paperspace", ".password-store",
    ".purple", ".snowflake", ".snowsql", ".ssh", ".terraform", ".terraform.d", ".vault",
}  # fmt: skip
"""Folders in which tools keep keys."""
# Files in which tools keep keys, in lower case. Sources: the signatures of gitrob and shhgit, and the places that the
# documentation of the tools names.
_KEY_FILES = (
    # environments and shells
    ".env", ".env[._~-]*", ".env~", "*.env", "env.local", ".envrc", ".dev.vars", ".exports", ".extra", ".*_history",
    ".*history", ".*sh_profile", ".profile", ".*shrc",
    # keys and where they are kept
    "*.pem", "*.key", "*.p8", "*.p12", "*.pkcs12", "*.pfx", "*.ppk", "*.asc", "*.gpg", "*.pgp", "*.age", "*.jks",
    "*.jceks", "*.bks", "*.keystore", "*.keychain", "*.kwallet", "*.agilekeychain", "*.kdb", "*.kdbx", "*.psafe3",
    "*.bek", "*.fve", "*.tpm", "*.keytab", "*.ovpn", "*.tblk", "*.rdp", "*.mobileprovision", "*.pcap", "*.cscfg",
    "*.publishsettings", "*[._-]rsa", "*[._-]dsa", "*[._-]ecdsa", "*[._-]ed25519", "*_rsa_key", "*_dsa_key",
    "*_ecdsa_key", "*_ed25519_key", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "krb5cc_*", "keyring", "keystore",
    "otr.private_key", "wg[0-9].conf", "*.wgconf", "wireguard*.conf",
    # passwords and logins
    ".netrc*", "_netrc", "netrc", "*.netrc", ".authinfo*", ".pgpass", "pgpass.conf", ".my.cnf", "my.cnf",
    ".mylogin.cnf", ".mongorc.js", ".htpasswd", "*.htpasswd", "htpasswd", "shadow", "proftpdpasswd", ".vault_pass*",
    ".vault-pass*", "vault_pass*", "*[._]vault_pass*", ".dbshell", "dbeaver-data-sources.xml", ".ftpconfig",
    "filezilla.xml", "recentservers.xml", "sitemanager.xml", "sftp.json", "sftp-config.json", ".remote-sync.json",
    "webservers.xml", ".muttrc", ".msmtprc", ".esmtprc", ".fetchmailrc", "robomongo.json", "logins.json", "key[34].db",
    "keys.db", "login.keychain*", "cookies", "cookies.txt", "*_cookies.txt", "cookies.sqlite", "pass.txt", "pw.txt",
    "pwd.txt", "ventrilo_srv.ini", "*recovery-codes*", "bitwarden_export*", "lastpass_export*", "1password_export*",
    ".*credentials",
    # clouds and clusters
    "kubeconfig*", "*[._-]kubeconfig", "*[._-]kubeconfig.y*ml", ".kubeconfig", ".dockercfg", ".dockerconfigjson",
    "docker-config.json", "kube[._-]config*", "*.tfstate", "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".terraformrc",
    "terraform.rc", "credentials.tfrc.json", ".boto", ".s3cfg", "s3cfg", ".ossutilconfig", ".obsutilconfig",
    ".cos.conf", ".linode-cli", "clouds.yaml", "secure.yaml", "openrc.sh", "admin-openrc.sh", "keystonerc*",
    ".passwd-s3fs", "passwd-s3fs", "rclone.conf", ".rclone.conf", ".mc", "application_default_credentials.json",
    "service-account*.json", "service_account*.json", "serviceaccount.json", "serviceaccountkey*.json",
    "*-service-account.json", "*firebase-adminsdk*.json", "gcp[_-]key*.json", "gcloud[_-]key*.json", "gcs[_-]key*.json",
    "sa[_-]key*.json", "client_secret*.json", "azureauth.json", ".bluemix", "apikey.json", "ibmcloud*.json",
    ".softlayer", ".databrickscfg", ".snowsql", ".trc", ".tugboat", "accesskeys.csv", "accesskeys*.csv",
    "*_accesskeys.csv", "rootkey.csv", "credentials.csv", "new_user_credentials.csv", ".vault-token", ".vault_token",
    "vault.yml", "vault.yaml", "master.key", ".ngc",
    # registries, hosts of code, tools of the trade
    ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", "pip.conf", "pip.ini", ".condarc", ".gem", ".git-credentials",
    ".gitcredentials", ".gitconfig", ".gitcookies", ".hgrc", ".netlify", "hub", ".wandbrc", ".comet.config",
    ".neptune*", "kaggle.json", ".kaggle.json", "hf[_-]token*", "hftoken*", "hf.token", ".hf_token*",
    ".huggingface_token", "huggingface[_-]token*", "clearml.conf", ".clearml.conf", "lambda_keys", ".claude.json",
    ".mcp.json", "mcp.json", "oauth_creds.json", "jupyter_notebook_config.json", ".modal.toml", "stored_tokens",
    ".openai*", ".anthropic*", ".cohere*", ".replicate*", ".mlflow-credentials", "heroku.json", ".circleci.yml",
    "nuget.config", "gradle.properties", "settings-security.xml", "database.yml", "database.yaml", "secret_token.rb",
    "knife.rb", "localsettings.php", "wp-config.php", "omniauth.rb", "carrierwave.rb", "salesforce.js", "mongoid.yml",
    "appsettings.*.json", ".streamlit-secrets.toml",
)  # fmt: skip
# Copies of such files with the keys taken out, to be filled in.
_TEMPLATES = (".example", ".sample", ".template", ".dist", ".tmpl")
# What a `key` or `token` is for; both are words of many other names: sort_key, next_token.
_GIVES_ACCESS = (
    "account|anthropic|api|aws|azure|bearer|bot|comet|deploy|discord|gcp|gh|git|github|gitlab|google|hf|hub|huggingface"
    "|kaggle|login|mlflow|neptune|ngc|npm|oauth|openai|pypi|refresh|sas|security|service|session|sign(ing)?|slack"
    "|tailscale|telegram|vault|wandb"
)
_HAS_KEYS = "claude|cohere|gemini|groq|lambda|mistral|nvidia|roboflow|runpod|vast(ai)?"  # mistral_tokens.bin is data
# Words in the name of a file that is no source code: it has keys.
_KEY_WORDS = re.compile(
    r"(^|_)(api_?keys?|auth|creds?|credentials?|keytab|passphrase|passwd|passwords?|private_?key|secrets?)(_|$)"
    r"|^_?token(_(txt|json|ya?ml|toml|ini|conf|bin|db))?$|^key_?(file_)?(txt|json|ya?ml|toml|ini|cfg|conf)$"
    r"|^(adc|gcloud|gcp|sa)(_sa)?_json$|(^|_)(smb)?credentials?(_|$)"
    rf"|(^|_)({_GIVES_ACCESS}|access|age|app|auth|csrf|encryption|gcloud|gcs|hmac|host|jwt|my|personal|priv|private|prod"
    r"|root|s3|sa|secret|server|sops|ssh|ssl|storage|sudo|tls)_?(key|pass|pat|token|webhook)s?(_|$)"
    rf"|(^|_)({_HAS_KEYS})_?keys?(_|$)"
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

# How keys begin that nothing else begins like, and the form of the rest. Sources: what issuers document, and the rules
# of gitleaks, detect-secrets and trufflehog.
_KEYS = {
    "sk-": r"(?:proj|svcacct|admin|or-v1|ant-[a-z]+[0-9]{2})-[\w-]{32}|(?<![\w-]sk-)[A-Za-z0-9]{32}",
    # models and experiments
    "AIza": r"[\w-]{35}(?![\w-])", "bedrock-api-key-": r"[\w+/=-]{20}", "csk-": r"[a-z0-9]{48}",
    "dapi": r"[a-f0-9]{32}(?!\w)", "fw_": r"[A-Za-z0-9]{24}(?!\w)", "gsk_": r"[A-Za-z0-9]{52}",
    "jina_": r"[\w-]{60}", "KGAT_": r"[a-f0-9]{32}", "lsv2_": r"(?:pt|sk)_[a-f0-9]{32}", "nvapi-": r"[\w-]{60}",
    "pcsk_": r"[A-Za-z0-9]{5,6}_[A-Za-z0-9]{63}", "pplx-": r"[A-Za-z0-9]{48}", "r8_": r"[\w-]{37}(?!\w)",
    "rpa_": r"[A-Z0-9]{32}", "tgp_v1_": r"[\w-]{43}", "wandb_v1_": r"[\w-]{40}", "xai-": r"\w{80}",
    # clouds and hosts
    "1//0": r"[\w-]{40}", "4b1d": r"[A-Za-z0-9]{38}(?!\w)", "ABSK": r"[A-Za-z0-9+/]{109}",
    "AQVN": r"[\w-]{35,38}(?!\w)", "LTAI": r"[A-Za-z0-9]{17,21}(?!\w)", "GOCSPX-": r"[\w-]{28}",
    "HRKU-AA": r"[\w-]{58}", "ya29.": r"[\w-]{30}", "bb_": r"(?:pr|ma)_[a-f0-9]{30}",
    "cfat_": r"[A-Za-z0-9]{40}[a-f0-9]{8}", "cfut_": r"[A-Za-z0-9]{40}[a-f0-9]{8}",
    "cfk_": r"[A-Za-z0-9]{40}[a-f0-9]{8}", "dop_v1_": "[a-f0-9]{64}", "doo_v1_": "[a-f0-9]{64}",
    "dor_v1_": "[a-f0-9]{64}", "fm1a_": r"[\w+/]{100}", "fm1r_": r"[\w+/]{100}", "fm2_": r"[\w+/]{100}",
    "fo1_": r"[\w-]{43}(?!\w)", "salad_cloud_": r"\w{1,7}_\w{7}", "sbp_": r"[a-z0-9]{40}(?!\w)",
    "tk-us-": r"[\w-]{48}", "tskey-": r"[a-z]+-\w+-[A-Za-z0-9]{20}", "v1.0-": r"[a-f0-9]{24}-[a-f0-9]{146}",
    # secrets, signing in, packages and code
    "A3-": r"[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}", "AKCp": r"[A-Za-z0-9]{69}",
    "API-": r"[A-Z0-9]{26}(?!\w)", "ATATT3": r"[\w=-]{180}", "CCIPAT_": r"[A-Za-z0-9]{22}_[a-fA-F0-9]{40}",
    "CLOJARS_": r"[a-z0-9]{60}", "bkua_": r"[a-z0-9]{40}", "cmVmdGtu": r"[A-Za-z0-9]{56}",
    "dckr_": r"(?:pat_[\w-]{27}|oat_[\w-]{32})",
    "dp.": r"(?:ct|pt|st(?:\.[\w-]{2,35})?|sa|scim|audit)\.[A-Za-z0-9]{40}", "hvb.": r"[\w-]{60}",
    "hvs.": r"[\w-]{24}", "npm_": r"[A-Za-z0-9]{36}(?!\w)", "ops_eyJ": r"[A-Za-z0-9+/]{60}",
    "pnu_": r"[A-Za-z0-9]{36}(?!\w)", "pul-": r"[a-f0-9]{40}(?!\w)", "pypi-AgE": r"[\w-]{50}",
    "rubygems_": r"[a-f0-9]{48}", "sgp_": r"(?:[a-fA-F0-9]{16}_|local_)?[a-fA-F0-9]{40}", "sha256~": r"[\w-]{43}",
    # services
    "EZAK": r"[A-Za-z0-9]{54}", "FLWSECK-": r"[0-9a-z]{32}-X", "NRAK-": r"[A-Z0-9]{27}", "NRII-": r"[\w-]{25}",
    "PMAK-": r"[a-f0-9]{24}-[a-f0-9]{34}", "SG.": r"[\w-]{22}\.[\w-]{43}", "SK": r"[0-9a-fA-F]{32}(?!\w)",
    "dnkey-": r"[\w=-]{26}-[\w=-]{52}", "dt0c01.": r"[A-Z0-9]{24}\.[A-Z0-9]{64}", "duffel_live_": r"[\w=-]{43}",
    "eyJrIjoi": r"[A-Za-z0-9]{70}", "figd_": r"[\w-]{40}", "fio-u-": r"[\w=-]{64}",
    "glc_": r"eyJ[A-Za-z0-9+/=]{60}", "glsa_": r"[A-Za-z0-9]{32}_[a-fA-F0-9]{8}", "ico-": r"[A-Za-z0-9]{32}(?!\w)",
    "key-": r"[a-f0-9]{32}(?!\w)", "lin_api_": r"[A-Za-z0-9]{40}", "ntn_": r"[0-9]{11}[A-Za-z0-9]{35}",
    "pat-eu1-": r"[0-9a-fA-F-]{36}(?!\w)", "pat-na1-": r"[0-9a-fA-F-]{36}(?!\w)", "phx_": r"\w{43}",
    "pscale_": r"(?:tkn|oauth|pw)_[\w=.-]{32}", "rdme_": r"[a-z0-9]{70}", "rk_live_": r"[A-Za-z0-9]{20}",
    "sk_live_": r"[A-Za-z0-9]{20}", "sntryu_": r"[a-f0-9]{64}", "sntrys_eyJ": r"[\w+/=]{40}",
    "shippo_live_": r"[a-fA-F0-9]{40}", "shpat_": r"[a-fA-F0-9]{32}", "shpca_": r"[a-fA-F0-9]{32}",
    "shppa_": r"[a-fA-F0-9]{32}", "shpss_": r"[a-fA-F0-9]{32}", "sm_aat_": r"[A-Za-z0-9]{16}",
    "sm_pat_": r"[A-Za-z0-9]{16}", "sm_sat_": r"[A-Za-z0-9]{16}", "sq0atp-": r"[\w-]{22}", "sq0csp-": r"[\w-]{40}",
    "tfp_": r"[\w.=-]{44}", "xkeysib-": r"[a-f0-9]{64}",
}  # fmt: skip
# Precise enough for source code: a kind of secret, and the form that its issuer gives it. Each form is searched for
# only in texts that contain one of its literals, which makes a scan of large texts fast.
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
        ("ccess", "ACCESS", "aws", "AWS"),
        r"(?i:aws_?secret_?(?:access_?)?key|secret_?access_?key)[\"']?\s*[:=]\s*[\"']?"
        r"(?![A-Za-z0-9/+]{30}EXAMPLEKEY)[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    "an AWS session token": (
        ("ession", "ESSION", "ecurity", "ECURITY"),
        r"(?i:aws_?(?:session|security)_?token|(?<![a-z])session_?token)[\"']?\s*[:=]\s*[\"']?"
        r"(?![A-Za-z0-9/+]{0,99}EXAMPLE)[A-Za-z0-9/+]{100}",
    ),
    "a GitHub token": (
        ("gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_"),
        r"(?<!\w)(?:gh[oprsu]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{20})",
    ),
    "a GitLab token": (
        (
            "glpat-",
            "gldt-",
            "glrt-",
            "glptt-",
            "glcbt-",
            "gloas-",
            "glagent-",
            "glsoat-",
            "glffct-",
            "glft-",
            "glimt-",
            "GR1348941",
        ),
        r"(?<!\w)(?:gl(?:pat|dt|rt|ptt|cbt|oas|agent|soat|ffct|ft|imt)-|GR1348941)[A-Za-z0-9_-]{20}",
    ),
    "a Hugging Face token": (
        ("hf_", "api_org_"),
        # Not a name such as 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, which is as long.
        r"(?<!\w)(?:hf|api_org)_(?!(?:[A-Z]{1,4}[a-z]{2,}[0-9]*)+(?!\w))[A-Za-z0-9]{34}(?!\w)",
    ),
    "a Slack token": (
        ("xox", "xapp-", "hooks.slack.com"),
        r"(?<!\w)xox[abceoprs]-(?:[0-9]-)?[0-9]{8,}-[A-Za-z0-9-]{6}|(?<!\w)xoxe(?:\.xox[bp])?-[0-9]-[A-Z0-9]{100}|(?<!\w)xapp-[0-9]-[A-Z0-9]{9,}-[0-9]{8,}-"
        r"|hooks\.slack\.com/services/T[A-Z0-9]{7,}/B[A-Z0-9]{7,}/[A-Za-z0-9]{16}",
    ),
    "an API key": (  # with what is typical of it in the middle
        (":AA", ".atlasv1.", "Q~", "_mmk", "/webhooks/", ".webhook.office.com"),
        r"(?<!\w)(?:[0-9]{8,10}:AA[\w-]{33}(?![\w-])|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60}"
        r"|[\w.~-]{3}[0-9]Q~[\w.~-]{31,34}(?![\w.~-])|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk(?!\w)"
        r"|discord(?:app)?\.com/api/webhooks/[0-9]{17,20}/[\w-]{60})|\.webhook\.office\.com/webhookb2/[0-9a-f]{8}-",
    ),
    "an Azure key": (("AccountKey=", "AccessKey="), r"(?:Account|SharedAccess)Key=[A-Za-z0-9+/]{42,86}="),
    "a JSON web token": (("eyJ",), r"(?<![\w-])eyJ[\w-]{16,}\.eyJ[\w-]{16,}\.[\w-]{16}"),
    "a signed URL": (
        ("-Signature=", "-signature=", "-Security-Token=", "-security-token=", "sig="),
        r"[?&](?i:X-(?:Amz|Goog)-Signature=[0-9a-f]{32}|X-Amz-Security-Token=[\w%+/=-]{32}"
        r"|sig=[\w%+/-]{40,}(?:%3D|=))",
    ),
    "a login": (
        ("machine", "_auth", '"auth"', '"username"', "sshpass", "curl", "client-key-data"),
        r"(?m:^|[\"'])\s*machine\s+\S+\s+login\s+\S+\s+password\s+(?![<$%{])\S{3}"
        r"|(?<!\w)_auth(?:Token)?\s*=\s*(?=\S*[0-9])[\w+/=-]{20}|\"auth\":\s*\"(?=[^\"]*[0-9])(?=[^\"]*[A-Z])[A-Za-z0-9+/]{12,}={0,2}\""
        r"|\"username\":\s*\"[^\"]*\",\s*\"key\":\s*\"[0-9a-f]{32}\""
        r"|curl\s[^\n]{0,80}?(?:-u|--user)[ =][\"']?[^\s:\"'$<{]+:"
        r"(?!(?i:passw|pwd|secret|token|xxx))[^\s:\"'$<{]{6}|sshpass\s+-p\s*[\"']?(?![$<\"'])\S{4}|client-key-data:\s*[A-Za-z0-9+/]{40}",
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
    r"(?P<name>ey|EY|oken|OKEN|ecret|ECRET|ass(?:w(?:or)?d)?|ASS(?:W(?:OR)?D)?|wd|WD)"
    r"(?P<between>[\"']?\]?(?:\s?:\s?[A-Za-z][\w.|\[\] ]{0,30}?)?\s{0,3}(?:=>|(?::{1,3}|[?.])?=|:|>)\s{0,3}"
    r"|[\"'],\s{0,3}(?:\w{1,9}=[\w.]{1,20},\s{0,3}){0,3}(?:default=)?(?=[\"'])"  # of an option of a parser
    r"|[\"']?,?\s{1,40}[\"']?value[\"']?:\s{0,3}"  # `- name: ...` and `value: ...` of a variable of a container
    r"|[\"']\)\s{0,3}or\s{0,3}(?=[\"'])|[ \t]{1,3})"
    r"(?P<open>[\"'`]?)(?P<value>[A-Za-z0-9+/_.~-]{16,2000})={0,2}(?P<end>[\"'`;,&|}<\s]|$)"
)
_OPTION_BEFORE = re.compile(r"(?<!\S)[\"']?--?[\w.-]*$")
_NAME_BEFORE = re.compile(r"[\w.-]*$")
# With the name of what encloses it: `wandb.login(key=...)`, and `key: ...` below `wandb:`.
_NAMES_BEFORE = re.compile(r"(?:[\w.-]+[\"']?(?:\(|\[|:\s+|:?\s?\{)[\"'\s]*)?[\w.-]*$")
_MAX_NAME = 60
_LEAST_BITS = 3.0  # per character; 16 random hexadecimal digits have about 3.4, words of a language about 3
_COMPILED_FORMS = {kind: (literals, re.compile(form)) for kind, (literals, form) in _FORMS.items()}
_COMPILED_KEYS = {
    start: (re.compile(re.escape(start)), re.compile(rf"(?<!\w){re.escape(start)}(?:{form})"))
    for start, form in _KEYS.items()
}

_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|credential|api_?key|access_?key|private_?key|(^|_)(authorization|bearer)(_|$)"
    rf"|(^|_)token(_|$)|(auth|access|api|bearer|hf|hub)token|(^|_)({_GIVES_ACCESS})_?key$"
)
# An argument may be called --eos-token or --sort-key: only tokens and keys that give access count.
_SECRET_ARGUMENT = re.compile(
    r"(^|_)(secret|passw(or)?d|passphrase|credentials?|api_?key|access_?key|private_?key)(_key)?$"
    rf"|^(token|bearer|authorization)$|(^|_)(auth|access|{_GIVES_ACCESS})_?(token|key)$"
)
_OPENS = "app|application|encryption|fernet|license|master|ssh|storage|subscription"
# More names, for values that look random.
_SECRET_VARIABLE = re.compile(
    r"(^|_)(token|pass|pwd)$|passw(or)?d$"
    rf"|(^|_)({_HAS_KEYS}|{_OPENS})_key$"
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
_MAYBE_SECRET_ARGUMENT = re.compile(rf"p|auth|key|(.*_)?(({_HAS_KEYS}|{_OPENS})_key|pass|pw|pwd)")
# Filters of sounds, and parts of a program's work: `--low-pass=8000Hz`, `--first-pass=stage_1`.
_OTHER_PASS = re.compile(
    r"(.*_)?(low|high|band|all|first|second|third|last|final|one|two|single|multi|forward|backward|per|by|num)_pass"
)
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
    text = text.replace("\\n", "\n").replace('\\"', '"')  # code in the strings of a notebook
    for kind, (literals, form) in _COMPILED_FORMS.items():
        if any(literal in text for literal in literals) and form.search(text):
            return kind
    for start, form in _COMPILED_KEYS.values():
        if any(form.match(text, beginning.start()) for beginning in start.finditer(text)):
            return "an API key"
    if any(_assigns_secret(text, assigned) for assigned in _ASSIGNED.finditer(text)):
        return "a key or token next to its name"
    return None


def _assigns_secret(text: str, assigned: re.Match[str]) -> bool:
    """True if a name that gives access stands before a value that looks random, not like a word, a call or a path."""
    if assigned["open"] not in ("", assigned["end"]) or not _looks_random(assigned["value"]):
        return False
    if assigned["name"] in ("wd", "WD") and assigned["value"].startswith("/"):  # the current folder, not a password
        return False
    before = text[max(0, assigned.start() - _MAX_NAME) : assigned.start()]
    # With a blank alone only after a variable (`ENV API_KEY ...`) or an option (`--api-key ...`), not in a sentence.
    if not assigned["between"].strip() and not assigned["name"].isupper() and not _OPTION_BEFORE.search(before):
        return False
    for names in (_NAME_BEFORE, _NAMES_BEFORE):
        beginning = names.search(before)
        assert beginning is not None  # it may be empty
        if before[: beginning.start()].endswith(("?", "&")):  # of a URL, whose forms are above
            return False
        name = _words(beginning[0] + assigned["name"]).strip("_")
        if _SECRET_ARGUMENT.search(name) or (names is _NAME_BEFORE and _SECRET_VARIABLE.search(name)):
            return True
    return False


def _looks_random(value: str) -> bool:
    # A name such as `tokens.api_key2` is made of words, most of them with a number at most.
    pieces = re.split(r"[._/~-]", value)
    random = [piece for piece in pieces if not re.fullmatch("[A-Za-z]*[0-9]{0,3}|[0-9]+", piece)]
    if 2 * sum(map(len, random)) <= sum(map(len, pieces)) or "example" in value.lower():
        return False
    return -sum(n / len(value) * log2(n / len(value)) for n in Counter(value).values()) >= _LEAST_BITS


def keeps_keys(name: str) -> bool:
    """True if tools keep keys in files of that name, whoever put it there."""
    lower = name.lower()
    if lower.endswith(_TEMPLATES):
        return False
    # A pattern also fits the names of code: hf_tokenizer.py.
    patterns = [pattern for pattern in _KEY_FILES if "*" not in pattern or lower.startswith(".") or not is_source(name)]
    return any(fnmatchcase(lower, pattern) for pattern in patterns)


def suggests_keys(name: str) -> bool:
    """True if a word in the name of a file that is no source code says that it has a key."""
    is_something_else = is_source(name) or name.lower().endswith((*_PICTURES, *_TEMPLATES))
    return not is_something_else and _KEY_WORDS.search(_words(name)) is not None


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
        for key in _AWS_SECRET.findall(text):
            if re.search("[a-z]", key) and re.search("[A-Z]", key) and re.search("[0-9]", key):
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
    if _MAYBE_SECRET_ARGUMENT.fullmatch(words) is None or _OTHER_PASS.fullmatch(words) is not None:
        return False
    # A password has digits or marks among its letters; a path, a word with a number or a time has not.
    text = value.strip("\"'")
    is_words = all(re.fullmatch("[A-Za-z]*[0-9]{0,3}", word) for word in re.split("[_-]", text))
    if is_words and not words.endswith(("pass", "pw", "pwd")):
        return False
    return re.fullmatch(r"(?=.*[A-Za-z])(?=.*[0-9!@#%^&*+~?])[^\s/.:,=()\[\]{}<>]{6,}", text) is not None
