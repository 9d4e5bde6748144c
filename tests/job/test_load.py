# ruff: noqa: E501 (what is expected stands on one line, as a person reads it)
from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.errors import Mistake
from packtrain.job import Job
from packtrain.job.document import scalar
from packtrain.job.job import ProgramSettings, TrainSettings
from packtrain.job.kinds import SCHEDULES
from packtrain.job.load import LoadedJob, load_job, read_document
from packtrain.job.secrets import find_secret, has_secret, names_secret
from packtrain.recipes import recipe_defaults
from packtrain.train.progress import Progress
from packtrain.train.schedule import ConstantSettings, CosineSettings, NoamSettings, PhasesSettings, rate_of
from packtrain.units import Duration

VALID = """\
name: en-de
recipe: translate
data:
  train: {bitext: [train.en, train.de]}
  valid:
    - bitext: valid.tsv
      weight: 2.0
model: base
train:
  duration: 50000 steps
  batch: 25000 tokens
  schedule: {noam: {warmup: 8000 steps, scale: 2.0}}   # as in the paper
  clip: 1.0
checkpoint: {every: 5 min}
"""
INLINE = "looks like a secret; put it in an environment variable and list its name under `environment`"
IN_REPORT = "looks like a secret; set MLFLOW_TRACKING_TOKEN instead, and list it under `environment`"
IN_STORE = "looks like a secret; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
IN_DATA = "looks like a secret; download the file and give its path instead"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str | bytes, *overrides: str, defaults: Mapping[str, object] | None = None) -> LoadedJob:
    Path("a.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load_job("a.yaml", overrides, lambda _recipe, _code, _model: defaults or {})


def refusal(text: str | bytes, *overrides: str, defaults: Mapping[str, object] | None = None) -> str:
    with pytest.raises(Mistake) as refused:
        load(text, *overrides, defaults=defaults)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_job_file_becomes_a_job_with_absolute_sources(directory: Path) -> None:
    loaded = load(VALID)
    assert loaded.job.name == "en-de"
    assert loaded.job.data.train[0].paths == (f"{directory}/train.en", f"{directory}/train.de")
    assert loaded.job.data.valid[0].paths == (f"{directory}/valid.tsv",)
    assert (loaded.directory, loaded.code) == (directory, directory)
    assert loaded.text == VALID
    assert Job.model_validate_json(loaded.job.model_dump_json()) == loaded.job


def test_data_paths_are_relative_to_the_job_file_not_to_the_current_directory(directory: Path) -> None:
    (directory / "jobs").mkdir()
    (directory / "jobs" / "b.yaml").write_text(VALID + "store: s3://bucket/runs\n")
    loaded = load_job("jobs/b.yaml")
    assert loaded.job.data.valid[0].paths == (f"{directory}/jobs/valid.tsv",)
    assert loaded.job.store == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("written", "meaning"),
    [
        ("mlruns", "{directory}/mlruns"),
        ("/srv/mlruns", "/srv/mlruns"),
        ("https://mlflow.example/team", "https://mlflow.example/team"),
        ("databricks", "databricks"),
    ],
)
def test_a_directory_of_mlflow_is_relative_to_the_job_file(directory: Path, written: str, meaning: str) -> None:
    assert load(f"{VALID}report: {{mlflow: {written}}}\n").job.report.mlflow == meaning.format(directory=directory)
    assert load(VALID).job.report.mlflow is None


def test_errors_name_the_file_as_it_was_given(directory: Path) -> None:
    (directory / "jobs").mkdir()
    (directory / "jobs" / "b.yaml").write_text(VALID.replace("batch:", "bacth:"))
    with pytest.raises(Mistake) as refused:
        load_job("jobs/b.yaml", defaults_of=lambda _recipe, _code, _model: {"train": {"batch": "1 tokens"}})
    assert str(refused.value) == "jobs/b.yaml:11: train.bacth: unknown key; did you mean 'batch'?"


@pytest.mark.parametrize(
    ("written", "meaning"),
    [
        *((word, None) for word in ("", "~", "null")),
        *((word, True) for word in ("true", "True")),
        *((word, word) for word in ("no", "on", "yes", "off", "y", "12:30", "2024-01-01", "1_000", "nan", "inf", "=")),
        ("017", 17),
        ("0o17", 15),
        ("0xF", 15),
        ("-5", -5),
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(written: str, meaning: object) -> None:
    read = scalar(written)
    assert read == meaning
    assert type(read) is type(meaning)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + last] * 10)}]\n" for last, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "a.yaml:1: the file is empty; create one with `packtrain init`"),
        ("# nothing\n", "a.yaml:1: the file is empty; create one with `packtrain init`"),
        ("null\n", "a.yaml:1: the file is empty; create one with `packtrain init`"),
        ("- a\n", "a.yaml:1: must be a mapping of fields, such as `name: en-de`"),
        ("name: a\nname: b\n", "a.yaml:2: name: duplicate key; first on line 1"),
        ("data:\n  train: {}\n  'train': {}\n", "a.yaml:3: data.train: duplicate key; first on line 2"),
        ("name: a\n---\nname: b\n", "a.yaml:2: a second YAML document starts here; a job file has only one"),
        ("name: !!str a\n", "a.yaml:1: name: YAML tags are not supported; write the plain value"),
        ("name: ! a\n", "a.yaml:1: name: YAML tags are not supported; write the plain value"),
        ("name: !!python/object/apply:os.system [ls]\n",
         "a.yaml:1: name: YAML tags are not supported; write the plain value"),
        ("!!map {name: a}\n", "a.yaml:1: YAML tags are not supported; write the plain value"),
        ("train: &t {seed: 1}\nevaluate:\n  <<: *t\n",
         "a.yaml:3: evaluate: merge keys (<<) are not supported; write the fields out"),
        ("a: &a [*a]\n", "a.yaml:1: a.0: the alias refers to itself"),
        ("a: *b\n", "a.yaml:1: a: the alias is not defined"),
        (BOMB, "a.yaml:4: d.7: more than 10,000 values, with aliases expanded"),
        (f"a: {nested(32)}\n", f"a.yaml:1: a{'.0' * 31}: nested deeper than 32 levels"),
        (f"a: {'[' * 100_000}\n", f"a.yaml:1: a{'.0' * 31}: nested deeper than 32 levels"),
        (f"a: &a {nested(20)}\nb: {'[' * 20}*a{']' * 20}\n", f"a.yaml:2: b{'.0' * 20}: nested deeper than 32 levels"),
        ("1: a\n", "a.yaml:1: a key must be a string; put it in quotes"),
        ("train:\n  ~: a\n", "a.yaml:2: train: a key must be a string; put it in quotes"),
        ("? [a]\n: b\n", "a.yaml:1: a key must be a string, not a list or a mapping"),
        (f"{'k' * 201}: a\n", "a.yaml:1: a key is longer than 200 characters"),
        ("name: .nan\n", "a.yaml:1: name: must be a finite number"),
        ("budget: {dollars: -.inf}\n", "a.yaml:1: budget.dollars: must be a finite number"),
        ("budget: {dollars: 1e999}\n", "a.yaml:1: budget.dollars: must be a finite number"),
        (f"train: {{seed: {'9' * 5000}}}\n", "a.yaml:1: train.seed: the integer is too large"),
        (b"name: a\nstore: caf\xe9\n", "a.yaml:2: not UTF-8 at byte 18; save the file as UTF-8"),
        ("name: a\nstore: \x07\n", "a.yaml:2: contains the control character U+0007"),
        ('name: a\nstore: "\\x1b[2J"\n', "a.yaml:2: store: contains the control character U+001B"),
        ('name: a\nstore: "a\\0b"\n', "a.yaml:2: store: contains the control character U+0000"),
        ("name: [a\n", "a.yaml:2: invalid YAML: did not find expected ',' or ']'"),
        ("name: a\n\tstore: b\n", "a.yaml:2: invalid YAML: found a tab character that violates indentation"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_job_is_refused_with_its_line(directory: Path, text: str | bytes, line: str) -> None:
    assert refusal(text) == line


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("recipe:", "recpie:", "a.yaml:2: recpie: unknown key; did you mean 'recipe'? (and 1 more)"),
        ("25000 tokens", "25000", "a.yaml:11: train.batch: needs a unit, such as '4096 tokens'"),
        ("50000 steps", "-1 steps", "a.yaml:10: train.duration: '-1 steps' must be greater than zero and less than 1e+15"),
        ("clip: 1.0", "clip: no", "a.yaml:13: train.clip: must be a number, not a string"),
        ("weight: 2.0", "weight: -2", "a.yaml:7: data.valid.0.weight: must be greater than 0"),
        ("[train.en, train.de]", "[a, ../b]", "a.yaml:4: data.train.0.bitext.1: '../b' is outside the job file's directory;"
         " use an absolute path"),
        ("scale: 2.0", "sacle: 2.0", "a.yaml:12: train.schedule.noam.sacle: unknown key; did you mean 'scale'?"),
        ("  batch: 25000 tokens\n", "", "a.yaml:9: train.batch is required"),
        ("name: en-de\n", "", "a.yaml:1: name is required"),
        ("recipe: translate\n", "", "a.yaml:1: recipe is required, unless the job has a program"),
        ("recipe: translate", "program: [a.py]", "a.yaml:3: data: must be a path, a list of paths, or a mapping of"
         " names to paths for a program; sources such as bitext belong to recipes (and 2 more)"),
        ("name: en-de", "name: En", "a.yaml:1: name: 'En' must be 1 to 63 characters from a-z, 0-9 and -"),
        ("base", "[]", "a.yaml:8: model: must be a mapping, not a list"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_with_its_line(directory: Path, old: str, new: str, line: str) -> None:
    assert refusal(VALID.replace(old, new)) == line


def test_the_first_of_several_mistakes_is_shown_and_the_others_are_counted(directory: Path) -> None:
    text = VALID.replace("batch:", "bacth:").replace("every:", "evry:").replace("clip:", "clpi:")
    assert refusal(text) == "a.yaml:11: train.bacth: unknown key; did you mean 'batch'? (and 3 more)"


def test_files_that_cannot_be_read_are_refused(directory: Path) -> None:
    def told(path: str) -> str:
        with pytest.raises(Mistake) as refused:
            load_job(path)
        return str(refused.value)

    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("large").write_bytes(b"#" * 1_000_001)
    assert told("none.yaml") == "none.yaml: no such file"
    assert told(".") == ".: is a directory, not a job file"
    assert told("pipe") == "pipe: is not a regular file"
    assert told("/dev/zero") == "/dev/zero: is not a regular file"
    assert told("loop") == "loop: cannot read it: Too many levels of symbolic links"
    assert told("large") == "large: larger than 1 MB, the limit for a job file"
    assert told("a\0b") == "a\\x00b: invalid path"


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(directory: Path) -> None:
    assert load(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode()).job == load(VALID).job


def test_aliases_are_expanded(directory: Path) -> None:
    job = load(VALID.replace("  train: {", "  test: &pairs {") + "budget: {}\n", "data.train={bitext: a.tsv}").job
    assert job.data.test[0].paths == (f"{directory}/train.en", f"{directory}/train.de")
    job = load(VALID.replace("  train: {", "  test: &pairs {").replace("  valid:", "  train: *pairs\n  valid:")).job
    assert job.data.train == job.data.test


# Secrets. None of these is one: they only have the shape.
AWS_ID = "AKIA" + "ABCDEFGHIJKLMNOP"
AWS_KEY = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzzzzzzz0KE"


@pytest.mark.parametrize(
    ("added", "line", "secret"),
    [
        ("password: hunter2", "a.yaml:15: password: ", "hunter2"),
        ("fleet: {local: {awsSecretKey: abcd}}", "a.yaml:15: fleet.local.awsSecretKey: ", "abcd"),
        ("budget:\n  api-key: abcd", "a.yaml:16: budget.api-key: ", "abcd"),
        ("budget: {HF_TOKEN: abcd}", "a.yaml:15: budget.HF_TOKEN: ", "abcd"),
        (f"store: {AWS_ID}", "a.yaml:15: store: ", AWS_ID),
        (f"environment: [AWS_ACCESS={AWS_KEY}]", "a.yaml:15: environment.0: ", AWS_KEY),
        (f"# aws\nenvironment:\n  - {AWS_ID}", "a.yaml:17: environment.0: ", AWS_ID),
        ("store: |\n  -----BEGIN RSA PRIVATE KEY-----\n  abc", "a.yaml:15: store: ", "BEGIN"),
        ("store: s3://me:pass@host/x", "a.yaml:15: store: ", "pass@"),
        ("store: https://host/x?X-Amz-Signature=abcdef", "a.yaml:15: store: ", "abcdef"),
        (f"code: ghp_{'a1' * 18}", "a.yaml:15: code: ", "a1a1"),
        (f"code: hf_{'aB' * 17}", "a.yaml:15: code: ", "aBaB"),
        ("code: xoxb-1234567890-abc", "a.yaml:15: code: ", "1234567890"),
        (f"{AWS_ID}: 1", "a.yaml:15: ", AWS_ID),
        (f"# my key is {AWS_ID}", "a.yaml:15: ", AWS_ID),
        ("program: [a.py, --password=hunter2]", "a.yaml:15: program.1: ", "hunter2"),
        ("program: [a.py, --token, hunter2]", "a.yaml:15: program.2: ", "hunter2"),
        ("program: [a.py, --hf-token, 12345]", "a.yaml:15: program.2: ", "12345"),
        ("program: [a.py, -c, 'x --api-key hunter2']", "a.yaml:15: program.2: ", "hunter2"),
        ("program: [a.py, DB_PASSWORD=hunter2]", "a.yaml:15: program.1: ", "hunter2"),
        ("program: [a.py, --wandb-key, hunter2]", "a.yaml:15: program.2: ", "hunter2"),
        ("program: [a.py, --sas-token=hunter2]", "a.yaml:15: program.1: ", "hunter2"),
        ("program: [a.py, --header, 'Authorization: Basic aHVudGVyMg']", "a.yaml:15: program.2: ", "aHVudGVyMg"),
        ("program: [a.py, Bearer hunter22]", "a.yaml:15: program.1: ", "hunter22"),
        ("budget: {wandb_key: hunter2}", "a.yaml:15: budget.wandb_key: ", "hunter2"),
        ("store: https://host/x?X-Goog-Signature=abcdef", "a.yaml:15: store: ", "abcdef"),
        ("store: https://host/x?X-Amz-Credential=abcdef", "a.yaml:15: store: ", "abcdef"),
        ("store: https://host/x?se=1&sig=abcdef", "a.yaml:15: store: ", "abcdef"),
        ("report: {mlflow: 'https://me:hunter2@host'}", "a.yaml:15: report.mlflow: ", "hunter2"),
        ("report: {mlflow: 'https://hunter2@host/path'}", "a.yaml:15: report.mlflow: ", "hunter2"),
    ],
)
def test_a_secret_is_refused_and_never_repeated(directory: Path, added: str, line: str, secret: str) -> None:
    told = refusal(VALID + added + "\n")
    assert told == line + {"store": IN_STORE, "report": IN_REPORT}.get(added.partition(":")[0], INLINE)
    assert secret not in told


AWS = "region: us-east-1, instances: [g5.xlarge], role: nodes"


def test_a_fleet_may_say_where_a_cloud_keeps_a_secret(directory: Path) -> None:
    job = load(f"{VALID}fleet: {{aws: {{{AWS}, secrets: {{HF_TOKEN: ssm:/team/hf}}}}}}\n").job
    assert job.fleet.kind.variable_fault("HF_TOKEN") is None
    assert "write fleet.aws.secrets: {OTHER: ssm:/name}" in str(job.fleet.kind.variable_fault("OTHER"))
    for value in (f"hf_{'aB3' * 12}", "hunter2"):
        told = refusal(f"{VALID}fleet: {{aws: {{{AWS}, secrets: {{HF_TOKEN: {value}}}}}}}\n")
        assert told.startswith("a.yaml:15: fleet.aws.secrets.HF_TOKEN: ")
        assert value not in told


@pytest.mark.parametrize(
    "secret", ["https://me:hunter2@host/a.tsv", "https://hunter2@host/a.tsv", "https://host/a.tsv?token=hunter2"]
)
def test_who_names_data_by_a_url_with_a_secret_is_told_to_download_it(directory: Path, secret: str) -> None:
    added = VALID.replace("  valid:", f"  test: {{bitext: '{secret}'}}\n  valid:")
    assert refusal(added).endswith(f": data.test.bitext: {IN_DATA}")


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("store", IN_STORE),
        ("data.test.0.bitext", IN_DATA),
        ("password", INLINE),
        ("fleet.local.secret_key", INLINE),
    ],
)
def test_a_secret_in_an_override_is_refused_too(directory: Path, field: str, told: str) -> None:
    assert refusal(VALID, f"{field}={AWS_ID}") == f"--set {field}: {told}"


@pytest.mark.parametrize(
    "text",
    [
        "25000 tokens", "--eos-token=</s>", "--token-budget=4096", "--max-tokens 100", "s3://bucket/a:b/c",
        "http://host:8080/x", "0123456789abcdef0123456789abcdef01234567", "--password=$PASSWORD", "task-" + "a" * 30,
        "--password-file=x", "https://host/a@b", "train.en", "--sort-key=length", "Bearer $TOKEN", "bearer of news",
        "--s3-key=raw/train.tar", "--key image", "--key=columns.text2", "-p 10", "-p 0.5", "--pass 2", "-p float16", "-p a/b2c3d4",
        "train.py -p bf16-mixed", "train.py --key epoch_10_loss", "train.py --first-pass=10",
        "train.py --low-pass=8000Hz", "HIGH_PASS=1000Hz train.py", "train.py --first-pass stage_1",
    ],
)  # fmt: skip
def test_strings_that_are_no_secrets_are_accepted(text: str) -> None:
    assert not has_secret(text)


@pytest.mark.parametrize("option", ["--key", "--pass", "-p", "--password", "--api-key", "--db-pass", "--license-key"])
def test_a_password_after_a_short_option_is_refused(directory: Path, option: str) -> None:
    assert has_secret(f"train.py {option} hunter2hunter")
    assert has_secret(f"train.py {option}=hunter2!")
    words = f"name: a\nprogram: [train.py, '{option}', hunter2hunter]\n"
    assert refusal(words) == f"a.yaml:2: program.2: {INLINE}"


def test_names_that_only_resemble_secrets_are_accepted() -> None:
    assert not any(map(names_secret, ("max_tokens", "tokenizer", "vocabulary", "key", "sort_key", "passes")))
    assert all(map(names_secret, ("token", "api_key", "apiKey", "AWS_ACCESS_KEY_ID", "authToken", "my.password")))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{'b3Bl' * 10}", "a private key"),
        (f'"private_key": "-----BEGIN PRIVATE KEY-----\\n{"MIIE" * 10}', "a private key"),
        (f"key = {AWS_ID!r}", "an AWS access key"),
        (f"aws_secret_access_key = {AWS_KEY}", "an AWS secret key"),
        (f"ghp_{'a1' * 18}", "a GitHub token"),
        (f"github_pat_{'a1' * 11}_{'b' * 59}", "a GitHub token"),
        (f"glpat-{'a1' * 10}", "a GitLab token"),
        (f"token='hf_{'aB' * 17}'", "a Hugging Face token"),
        ("xoxb-" + "1234567890-abcdefghijkl", "a Slack token"),
        (f"sk-{'a1B' * 16}", "an API key"),
        (f"sk-proj-{'a_B-' * 16}", "an API key"),
        (f"AIza{'a1B' * 11}zz", "an API key"),
        (f"AccountName=me;AccountKey={'a1' * 43}==", "an Azure key"),
        (f"eyJ{'a' * 20}.eyJ{'b' * 20}.{'c' * 30}", "a JSON web token"),
        (f"https://host/x?X-Amz-Expires=9&X-Amz-Signature={'a1' * 32}", "a signed URL"),
        (f"https://host/x?X-Goog-Signature={'a1' * 32}", "a signed URL"),
        (f"https://host/x?se=1&sig={'a1' * 21}%3D", "a signed URL"),
        (f'{{"Authorization": "Bearer {"a1" * 12}"}}', "an authorization header"),
        (f"curl -H 'Authorization: Basic {'a1' * 12}'", "an authorization header"),
        ("postgres://me:hunter" + "2@db.internal/x", "a password in a URL"),
        (f'"SecretAccessKey": "{AWS_KEY}"', "an AWS secret key"),
        (f"export AWS_SESSION_TOKEN={'aB3/' * 30}", "an AWS session token"),
        (f'"SessionToken": "{"aB3/" * 30}"', "an AWS session token"),
        ("machine api.wandb.ai login user password " + "0a1b2c3d" * 5, "a login"),
        ("machine host\n  login me\n  password hunter" + "2", "a login"),
        ("//registry.npmjs.org/:_authToken=" + "0a1b2c3d-" * 4, "a login"),
        ('{"auths": {"ghcr.io": {"auth": "' + "bWU6aHVudGVyMg" + '=="}}}', "a login"),
        ('{"username": "me", "key": "' + "0a1b2c3d" * 4 + '"}', "a login"),
        ("sshpass -p hunter" + "2 ssh host", "a login"),
        ("gsk_" + "aB3x" * 13, "an API key"),
        ("dckr_pat_" + "aB3" * 9, "an API key"),
        ("1234567890:AA" + "aB3" * 11, "an API key"),
        ("AWS_BEARER_TOKEN_BEDROCK=ABSK" + "aB3x" * 27 + "Q", "an API key"),
        ("id = '" + "aB38Q~" + "aB3x" * 8 + "'", "an API key"),
        ("cmVmdGtu" + "aB3x" * 14, "an API key"),
        ("https://discord.com/api/webhooks/" + "123456789012345678/" + "aB3-x" * 14, "an API key"),
        ("curl -u admin:" + "k7Qz93xYw host", "a login"),
        ('wandb.login(key="' + "0a1b2c3d4e" * 4 + '")', "a key or token next to its name"),
        ("wandb:\n  key: " + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ("ENV WANDB_API_KEY " + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ('  - "WANDB_API_KEY=' + "0a1b2c3d4e" * 4 + '"', "a key or token next to its name"),
        ("curl -H 'X-API-Key: " + "0a1b2c3d4e" * 4 + "'", "a key or token next to its name"),
        ('["os.environ[\\"WANDB_API_KEY\\"] = \\"' + "0a1b2c3d4e" * 4 + '\\"\\n"]', "a key or token next to its name"),
        ("c.ServerApp.token = '" + "0a1b2c3d4e" * 4 + "'", "a key or token next to its name"),
        ("MONITOR_TOKEN=" + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ('setenv("WANDB_API_KEY", "' + "0a1b2c3d4e" * 4 + '")', "a key or token next to its name"),
        ("train --api-token=" + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ("WANDB_API_KEY=" + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ("SL_API_KEY: " + "0a1b2c3d4e5f6789" * 4, "a key or token next to its name"),
        ('os.environ["COMET_API_KEY"] = "' + "aB3dE5fG7hJ9kL1" * 2 + '"', "a key or token next to its name"),
        ("neptune.init(api_token='" + "eyJhcGlfYWRkcmVzcyI6Im" * 3 + "9'", "a key or token next to its name"),
        ('{"client_secret": "' + "GOC5PX-aB3dE5fG7hJ9kL1" + '"}', "a key or token next to its name"),
        ("DB_PASSWORD=" + "k7Qz-93xYw_Lp2vN", "a key or token next to its name"),
        ("PGPASSWORD=" + "k7Qz-93xYw_Lp2vN", "a key or token next to its name"),
        ("export KAGGLE_KEY=" + "0a1b2c3d" * 4, "a key or token next to its name"),
        ("python train.py --wandb-api-key " + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ('add("--api-key", type=str, default="' + "0a1b2c3d4e" * 4 + '")', "a key or token next to its name"),
        ("- name: WANDB_API_KEY\n  value: " + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ('{"name": "API_TOKEN", "value": "' + "0a1b2c3d4e" * 4 + '"}', "a key or token next to its name"),
        ('api_key: str | None = "' + "0a1b2c3d4e" * 4 + '"', "a key or token next to its name"),
        ('os.environ.get("API_KEY") or "' + "0a1b2c3d4e" * 4 + '"', "a key or token next to its name"),
        ("WANDB_API_KEY ?= " + "0a1b2c3d4e" * 4, "a key or token next to its name"),
        ("<password>" + "k7Qz-93xYw_Lp2vN" + "</password>", "a key or token next to its name"),
        ('os.environ["AWS_SESSION_TOKEN"] = "' + "IQoJb3JpZ2luX2Vj+/1a" * 18 + '"', "a key or token next to its name"),
        ("AWS_SECURITY_TOKEN=" + "IQoJb3JpZ2luX2Vj1aBc" * 18, "an AWS session token"),
    ],
)
def test_a_secret_in_code_is_named(text: str, kind: str) -> None:
    assert find_secret(f"first line\n{text}\nlast line") == kind
    assert has_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        "postgres://postgres:postgres@localhost:5432/test",
        'if line == "-----BEGIN PRIVATE KEY-----":', "-----BEGIN CERTIFICATE-----\n" + "MIIE" * 20,
        "AKIA" + "IOSFODNN7EXAMPLE", "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", "sk-estimator-doc-link-with-a-long-name-of-css",
        "postgres://user:password@host/x", "f'https://{user}:{password}@{host}'", "headers['Authorization'] = f'Bearer {token}'",
        "hf_token = os.environ['HF_TOKEN']", "git@github.com:me/x.git", "0123456789abcdef0123456789abcdef01234567",
        "data:image/png;base64,AKIA" + "iVBORw0KGgoAAAANSUhEUgAA", "https://host/x?sig=abc",
        "api_key = os.environ['WANDB_API_KEY']", "api_key=settings.providers.openai.api_key2", "token = self.tokenizer_v2.next_token",
        "API_KEY=your-api-key-goes-here", "password: correct horse battery staple", "docker_auth = optional_docker_auth_1()",
        "token=0123456789012345", "the machine will login and ask for a password", '"key": "value"', "sort_key='column_name_number_1'",
        "sha256:0123456789abcdef0123456789abcdef01234567", "api_key=AAAAAAAAAAAAAAAAAAAAAA1", "ssh_key_path=/home/me/.ssh/id_rsa1",
        "load(model, token=token, local_files_only=local_files_only, x=1)", "get(location, use_auth_token, device=args.device )",
        "a = AddedToken(token, normalized=False, special=True)", 'body["ai21labs_api_key"] = self.ai21labs_api_key\n',
        'env=["HF_TOKEN", "TOKENIZERS_PARALLELISM=false"]', '{"id": 3, "key": "d41d8cd98f00b204e9800998ecf8427e"}',
        "https://host/data.zip?alt=media&token=46d5e637-3411-4188-bc44-5809b5bfb5f4 ", "eos_token = tokenizer.special_tokens_2",
        "PWD=/scratch/d41d8cd98f00b204e9800998", "docker run -v $PWD:/cache/d41d8cd98f00b204e9800998 train",
        "the password 46d5e63734114188bc44 is only an example", 'cache_key: str = "d41d8cd98f00b204e9800998ecf8427e"',
        'add("--token", type=str, default="end_of_text_token_50256")', "- name: CACHE_KEY\n  value: d41d8cd98f00b204e9800998",
        'aws = {"SessionToken": "' + "AQoEXAMPLEH4aoAH0gNCAPyJxz4BlCFFxWNE1OPTgk5T" * 3 + '"}',
    ],
)  # fmt: skip
def test_ordinary_code_has_no_secret(text: str) -> None:
    assert find_secret(text) is None


# Overrides and defaults.


@pytest.mark.parametrize("program", ["[train.py, --lr, '1']", "{command: [train.py, --lr, '1']}"])
def test_what_a_program_resumes_with_can_be_set_whatever_form_the_file_has(program: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"name: mine\nprogram: {program}\n")
    overrides = ["program.resume=[--init_from=resume]", "program.command.2='2'"]
    settings = load_job(tmp_path / "job.yaml", overrides).job.program
    assert settings == ProgramSettings(command=("train.py", "--lr", "2"), resume=("--init_from=resume",))


def test_a_word_of_a_command_alone_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\nprogram: [train.py, --lr, '1']\n")
    settings = load_job(tmp_path / "job.yaml", ["program.2='2'"]).job.program
    assert settings == ProgramSettings(command=("train.py", "--lr", "2"))


def test_any_field_can_be_set(directory: Path) -> None:
    job = load(
        VALID,
        "train.duration=100 steps",
        "model.dropout=0.1",
        "data.train.0.weight=3",
        "data.valid.0.bitext.0=/other.tsv",
        "data.valid.1={bitext: more.tsv}",
        "data.test.0.bitext=[a, b]",
        "train.schedule.noam.warmup=7 steps",
        "fleet=local",
        "fleet.local.machines=2",
        "train.clip=",
        "budget.hours=1e1",
    ).job
    assert job.train.duration == Duration(100, "steps")
    assert (job.model.size, job.model.options) == ("base", {"dropout": 0.1})
    assert job.data.train[0].weight == 3
    assert [source.paths for source in job.data.valid] == [("/other.tsv",), (f"{directory}/more.tsv",)]
    assert job.data.test[0].paths == (f"{directory}/a", f"{directory}/b")
    assert job.train.schedule == NoamSettings(warmup=Duration(7, "steps"), scale=2.0)
    assert (job.fleet.kind.model_dump(), job.train.clip, job.budget.hours) == (
        {"machines": 2, "power_off": False},
        None,
        10,
    )


def test_the_last_of_two_overrides_wins(directory: Path) -> None:
    assert load(VALID, "train.seed=2", "train.seed=3").job.train.seed == 3


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.duraton=1 steps", "--set train.duraton: unknown key; did you mean 'duration'?"),
        ("trian.duration=1 steps", "--set trian: unknown key; did you mean 'train'?"),
        ("train.duration=1 stpes", "--set train.duration: unknown unit 'stpes' in '1 stpes'; did you mean 'steps'?"),
        ("train.seed", "--set train.seed: write it as field=value, such as train.seed=2"),
        ("train..seed=1", "--set train..seed: invalid field; write it with dots, such as train.seed=2"),
        ("=1", "--set : invalid field; write it with dots, such as train.seed=2"),
        ("train.seed=[1", "--set train.seed: invalid YAML: did not find expected ',' or ']'"),
        ("train.seed=!!int 1", "--set train.seed: YAML tags are not supported; write the plain value"),
        ("train.clip=.inf", "--set train.clip: must be a finite number"),
        ("train={seed: 1, seed: 2}", "--set train.seed: duplicate key; first on line 1"),
        ("train.clip.x=1", "--set train.clip.x: train.clip is a value and has no fields"),
        ("data.train.5.weight=1", "--set data.train.5: no such item; the list has 1 item, numbered from 0"),
        ("data.train.x=1", "--set data.train.x: no such item; the list has 1 item, numbered from 0"),
        ("data.train.0.weight=-1", "--set data.train.0.weight: must be greater than 0"),
        ("name=\x1b", "--set name: contains the control character U+001B"),
        ("name=\udc80", "--set name: contains the control character U+DC80"),
        ("train.schedule={noam: {warmup: 1 steps}}",
         "--set train.schedule.noam: set exactly one of scale and peak"),
        ("program=[a.py]", "--set program: a job has a recipe or a program, not both"),
        ("train.schedule.constant.rate=1",
         f"a.yaml:12: train.schedule: must name one kind, not 2; known: {', '.join(sorted(SCHEDULES))}"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_by_its_name(directory: Path, override: str, line: str) -> None:
    assert refusal(VALID, override) == line


DEFAULTS: Mapping[str, Any] = {
    "model": {"size": "tiny", "dropout": 0.1},
    "train": {
        "duration": "10 steps",
        "batch": "64 tokens",
        "clip": 5.0,
        "schedule": {"constant": {"rate": 1e-3}},
    },
    "evaluate": {"every": "100 steps"},
}
SHORT = "name: a\nrecipe: translate\ndata: {train: {bitext: a.tsv}}\n"


def test_the_defaults_of_a_recipe_fill_what_the_file_omits(directory: Path) -> None:
    job = load(SHORT, defaults=DEFAULTS).job
    assert job.train.schedule == ConstantSettings(rate=1e-3)
    assert (job.model.size, job.train.clip) == ("tiny", 5.0)


def test_the_file_wins_field_by_field_and_kinds_never_mix(directory: Path) -> None:
    job = load(VALID.replace("clip: 1.0", "clip: null"), defaults=DEFAULTS).job
    assert job.train.schedule == NoamSettings(warmup=Duration(8000, "steps"), scale=2.0)
    assert job.train.clip is None
    assert (job.model.size, job.model.options) == ("base", {"dropout": 0.1})
    assert job.evaluate.every == Duration(100, "steps")


def test_an_override_wins_over_the_defaults(directory: Path) -> None:
    job = load(SHORT, "train.schedule.constant.rate=0.5", "model=big", defaults=DEFAULTS).job
    assert job.train.schedule == ConstantSettings(rate=0.5)
    assert (job.model.size, job.model.options) == ("big", {})


def test_a_field_that_neither_the_file_nor_the_recipe_has_is_required(directory: Path) -> None:
    assert refusal(SHORT, defaults={**DEFAULTS, "train": {}}) == "a.yaml:1: train.duration is required (and 2 more)"
    soon = {**DEFAULTS, "evaluate": {"every": "soon"}}
    assert refusal(SHORT, defaults=soon).startswith("a.yaml:1: evaluate.every: 'soon' is not a number with a unit")
    assert refusal("name: a\nrecipe: x\n", defaults=DEFAULTS) == "a.yaml:1: data.train is required"


def test_an_unknown_recipe_is_refused_with_its_line(directory: Path) -> None:
    def unknown(recipe: str, _code: Path, _model: Mapping[str, object]) -> Mapping[str, object]:
        raise Mistake(f"unknown recipe {recipe!r}; did you mean 'translate'?")

    Path("a.yaml").write_text(VALID)
    with pytest.raises(Mistake, match=r"^a\.yaml:2: recipe: unknown recipe 'translate'; did you mean"):
        load_job("a.yaml", defaults_of=unknown)
    with pytest.raises(Mistake, match=r"^--set recipe: unknown recipe 'x'; did you mean"):
        load_job("a.yaml", ["recipe=x"], unknown)


def test_the_defaults_of_a_recipe_are_not_changed_by_overrides(directory: Path) -> None:
    before = repr(DEFAULTS)
    load(SHORT, "train.schedule.constant.rate=0.5", "evaluate.beam=2", defaults=DEFAULTS)
    assert repr(DEFAULTS) == before


def test_a_later_mistake_is_shown_with_the_place_of_its_field(directory: Path) -> None:
    loaded = load(VALID, "model.dropuot=1")
    assert str(loaded.mistake("train.batch", "too small")) == "a.yaml:11: train.batch: too small"
    assert str(loaded.mistake("data.valid.0.bitext", "is gone")) == "a.yaml:6: data.valid.0.bitext: is gone"
    assert str(loaded.mistake("model.dropuot", "unknown")) == "--set model.dropuot: unknown"


def test_a_document_knows_the_line_of_every_field(directory: Path) -> None:
    Path("a.yaml").write_text(VALID)
    document = read_document("a.yaml")
    assert document.place(("train", "schedule", "noam", "scale")) == 12
    assert document.place(("data", "valid", 0, "weight")) == 7


# Whatever the file: a job or one line, and soon.

PIECES = (
    b"&a ", b"*a", b"!!int ", b"<<: ", b"---\n", b"{", b"}", b"[", b"]", b"? ", b": ", b"- ", b"|\n", b"'", b'"', b"\\x00",
    b"\t", b"\n", b"\r", b"\xff", b"\xe2\x80\xa8", b"\xef\xbf\xbf", b".nan", b"1e999", b"9" * 500, b"null", b"#", b"%TAG ! x\n",
    b"\xc2\x85", b"\\ud800", b"..", b"/", b"://a:b@", b"  ", b"train:\n", b"0", b"-",
)  # fmt: skip


def job_or_one_line(path: Path, content: bytes, overrides: tuple[str, ...] = ()) -> None:
    path.write_bytes(content)
    started = time.process_time()
    try:
        job = load_job(path, overrides, lambda _recipe, _code, _model: DEFAULTS).job
    except Mistake as mistake:
        line = str(mistake)
        assert line.isprintable(), line
        line.encode()
        assert len(line) < 1000
    else:
        assert Job.model_validate_json(job.model_dump_json()) == job
    assert time.process_time() - started < 2


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_give_a_job_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    job_or_one_line(tmp_path_factory.getbasetemp() / "any.yaml", content)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 4))
def test_a_damaged_job_file_gives_a_job_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, seed: int, changes: int
) -> None:
    chance = random.Random(seed)  # noqa: S311
    content = bytearray(VALID.encode())
    for _ in range(changes):
        start = chance.randrange(len(content) + 1)
        end = start + chance.choice((0, 0, 1, 3, 20))
        content[start:end] = chance.choice((b"", *PIECES, bytes(content[start // 2 : start // 2 + 30])))
    job_or_one_line(tmp_path_factory.getbasetemp() / "damaged.yaml", bytes(content))


@settings(max_examples=150, deadline=None)
@given(
    field=st.sampled_from(["train.seed", "data.train.0.bitext", "model", "fleet", "data.train", "", "a.0.b"]),
    value=st.text(max_size=40) | st.sampled_from(["{}", "[]", "{a: 1}", "[[]]", "&a [*a]", "-1", "1 steps"]),
)
def test_any_override_gives_a_job_or_one_line(tmp_path_factory: pytest.TempPathFactory, field: str, value: str) -> None:
    path = tmp_path_factory.getbasetemp() / "override.yaml"
    job_or_one_line(path, VALID.encode(), (f"{field}={value}",))


@pytest.mark.parametrize(
    "content",
    [
        b"-a." * 300_000,
        b"a: " + b"-a." * 300_000,
        b"a: '" + b"eyJ" * 300_000 + b"'",
        b"a: " + b"x" * 999_000,
        b"[" * 999_000,
        b"- " * 499_000,
        b"? " * 499_000,
        b"{a: " * 249_000,
        b"".join(b"k%d: 1\n" % number for number in range(4990)),
        b"train: {" + b", ".join(b"k%d: aws" % number for number in range(4990)) + b"}",
        b"data: {train: [" + b"{bitxt: a}, " * 3000 + b"]}",
        b"a: [" + (AWS_KEY.encode() + b" , ") * 9000 + b"]",
        b"a: " + b"://" * 330_000,
        b"a: '" + b" " * 900_000 + b"--x" + b" " * 90_000 + b"'",
        b"&a " * 300_000,
        b"a:\n" + b" " * 990_000,
        BOMB.encode(),
    ],
    ids=range(17),
)
def test_large_and_odd_files_are_read_or_refused_quickly(tmp_path: Path, content: bytes) -> None:
    job_or_one_line(tmp_path / "a.yaml", content)


def test_the_job_files_in_the_reference_are_valid(directory: Path) -> None:
    reference = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
    examples = [block.split("```")[0] for block in reference.split("```yaml\n")[1:]]
    assert len(examples) == 3
    for example in examples:
        load(example, defaults=DEFAULTS if "recipe:" in example else {})


# A job that is tried for a shorter time than it was written for.

LONG = """
name: long
recipe: classify
data: {train: [{imagenet: images}]}
train:
  duration: 40 epochs
  batch: 8 samples
  schedule: {cosine: {peak: 0.1, warmup: 4 epochs}}
evaluate: {every: 10 epochs}
checkpoint: {every: 20 epochs}
"""


@pytest.mark.parametrize(
    ("overrides", "fitted"),
    [
        (["train.duration=20 epochs"], ("4 epochs", "10 epochs", "10 epochs")),  # the interval is as long as the run
        (["train.duration=2 epochs"], ("0.4 epochs", "0.5 epochs", "1 epochs")),
        (["train.duration=50 steps"], ("5 steps", "10 epochs", "20 epochs")),  # an epoch may have fewer steps
        (["train.duration=5 steps"], ("1 steps", "10 epochs", "20 epochs")),
        (["train.duration=1 steps"], ("None", "10 epochs", "20 epochs")),
        (["train.duration=5 epochs", "evaluate.every=9 epochs"], ("1 epochs", "9 epochs", "2.5 epochs")),
        (["train.duration=80 epochs"], ("4 epochs", "10 epochs", "20 epochs")),
    ],
)
def test_what_does_not_fit_into_a_shorter_run_shrinks_with_it(
    tmp_path: Path, overrides: list[str], fitted: tuple[str, str, str]
) -> None:
    (tmp_path / "job.yaml").write_text(LONG)
    loaded = load_job(tmp_path / "job.yaml", ["model=tiny", *overrides])
    job = loaded.job
    assert isinstance(job.train.schedule, CosineSettings)
    assert tuple(map(str, (job.train.schedule.warmup, job.evaluate.every, job.checkpoint.every))) == fitted
    before = ("4 epochs", "10 epochs", "20 epochs")
    changed = sum(one != other for one, other in zip(before, fitted, strict=True))
    assert len(loaded.notes) == changed - ("evaluate.every=9 epochs" in overrides)


def test_a_note_says_what_shrinks_and_why(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(LONG)
    [note] = load_job(tmp_path / "job.yaml", ["model=tiny", "train.duration=50 steps"]).notes
    assert note == "train.schedule.cosine.warmup: 4 epochs -> 5 steps, to fit train.duration"


def test_a_warm_up_that_is_set_as_well_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(LONG)
    with pytest.raises(Mistake, match=r"warmup: must be shorter than the run"):
        load_job(
            tmp_path / "job.yaml", ["model=tiny", "train.duration=5 steps", "train.schedule.cosine.warmup=9 steps"]
        )


def test_the_warm_up_of_noam_shrinks_to_reach_its_peak(tmp_path: Path) -> None:
    text = LONG.replace("40 epochs", "1000 steps").replace(
        "{cosine: {peak: 0.1, warmup: 4 epochs}}", "{noam: {peak: 0.1, warmup: 100 steps}}"
    )
    (tmp_path / "job.yaml").write_text(text)
    schedules = [
        load_job(tmp_path / "job.yaml", ["model=tiny", f"train.duration={steps} steps"]).job.train.schedule
        for steps in (200, 50, 1)
    ]
    assert [str(one.model_dump()["warmup"]) for one in schedules] == ["40 steps", "10 steps", "1 steps"]


def test_a_shorter_warm_up_of_noam_keeps_its_peak(tmp_path: Path) -> None:
    text = LONG.replace("40 epochs", "50000 steps").replace(
        "{cosine: {peak: 0.1, warmup: 4 epochs}}", "{noam: {scale: 2.0, warmup: 8000 steps}}"
    )
    (tmp_path / "job.yaml").write_text(text)
    train = load_job(tmp_path / "job.yaml", ["model=tiny", "train.duration=300 steps"]).job.train
    peak = max(rate_of(train, 128)(Progress(step)) for step in range(300))
    assert peak == pytest.approx(2.0 * 128**-0.5 * 8000**-0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "duration", "doubts"),
    [
        ("{noam: {peak: 0.1, warmup: 100 steps}}", "100 steps", 1),
        ("{noam: {peak: 0.1, warmup: 100 steps}}", "101 steps", 0),
        ("{noam: {peak: 0.1, warmup: 100 steps, share: 0.2}}", "100 steps", 0),
        ("{noam: {peak: 0.1, warmup: 100 steps}}", "1 epochs", 0),  # nobody knows yet how many steps that is
        ("{step: {rate: 0.1, every: 1 epochs, warmup: 2 epochs}}", "1 epochs", 1),
    ],
)
def test_a_written_warm_up_that_never_ends_is_kept_with_a_note(
    tmp_path: Path, schedule: str, duration: str, doubts: int
) -> None:
    text = LONG.replace("40 epochs", duration).replace("{cosine: {peak: 0.1, warmup: 4 epochs}}", schedule)
    (tmp_path / "job.yaml").write_text(text)
    notes = load_job(tmp_path / "job.yaml", ["model=tiny"]).notes
    assert len(notes) == doubts
    assert all("do not end before the run" in note for note in notes)


# Defaults suit the duration.

DURATIONS = ("1 step", "10 steps", "2000 steps", "1 epochs", "3 epochs", "50000 steps", "50 epochs", "10 min", "30 h")
DATA = {"translate": "bitext: a.tsv", "chat": "dialogue: a.tsv", "classify": "imagenet: a", "caption": "coco: [a, b]"}


def default_job(path: Path, recipe: str, *overrides: str, duration: str = "2000 steps", model: str = "tiny") -> Job:
    data = f"data: {{train: {{{DATA[recipe]}}}}}"
    path.write_text(f"name: a\nrecipe: {recipe}\n{data}\nmodel: {model}\ntrain: {{duration: {duration}}}\n")
    loaded = load_job(path, overrides, recipe_defaults)
    assert not loaded.notes
    return loaded.job


@pytest.mark.parametrize("duration", DURATIONS)
@pytest.mark.parametrize("recipe", DATA)
def test_the_defaults_of_every_recipe_suit_any_duration(tmp_path: Path, recipe: str, duration: str) -> None:
    job = default_job(tmp_path / "job.yaml", recipe, duration=duration)
    assert default_job(tmp_path / "job.yaml", recipe, f"train.duration={duration}") == job
    steps = int(job.train.duration.value * {"steps": 1, "epochs": 300, "seconds": 1}[job.train.duration.unit])
    rate = rate_of(job.train, 128)
    rates = [rate(Progress(step, step / 300)) for step in range(0, steps, max(1, steps // 100))]
    assert 0 < max(rates) <= 0.1
    assert rates.index(max(rates)) <= max(1, 0.21 * len(rates)), "a fifth of the run is warm-up"
    assert steps < 1000 or max(rates) == pytest.approx(max(rates_of_long_run(tmp_path, recipe)), rel=0.15)


def rates_of_long_run(tmp_path: Path, recipe: str) -> list[float]:
    rate = rate_of(default_job(tmp_path / "long.yaml", recipe, duration="100000 steps").train, 128)
    return [rate(Progress(step)) for step in range(0, 100_000, 100)]


@pytest.mark.parametrize("width", [512, 1024])
def test_a_long_run_of_translate_has_the_published_rates_bit_for_bit(tmp_path: Path, width: int) -> None:
    for duration in ("40000 steps", "50000 steps", "300000 steps"):
        rate = rate_of(default_job(tmp_path / "job.yaml", "translate", duration=duration, model="base").train, width)
        for step in (0, 1, 100, 7998, 7999, 8000, 39_999):
            published = 2.0 * width**-0.5 * min((step + 1) * 8000**-1.5, (step + 1) ** -0.5)
            assert rate(Progress(step)) == published


def test_captions_from_pretrained_weights_have_the_published_rates(tmp_path: Path) -> None:
    model = "{size: resnet101, weights: /w.safetensors}"
    for duration in ("1 epochs", "15 epochs", "2 h"):
        assert isinstance(
            default_job(tmp_path / "job.yaml", "caption", duration=duration, model=model).train.schedule, PhasesSettings
        )


@pytest.mark.parametrize(
    ("recipe", "override", "schedule"),
    [
        ("translate", "noam.peak=0.001", {"noam": {"warmup": "8000 steps", "peak": 0.001, "share": 0.2}}),
        ("translate", "noam.scale=1.0", {"noam": {"warmup": "8000 steps", "scale": 1.0, "share": 0.2}}),
        (  # the peak stays
            "translate",
            "noam.warmup=80 steps",
            {"noam": {"warmup": "80 steps", "scale": 0.3, "share": 0.2}},
        ),
        ("translate", "noam.share=0.1", {"noam": {"warmup": "8000 steps", "scale": 3.0, "share": 0.1}}),
        ("classify", "cosine.peak=0.3", {"cosine": {"peak": 0.3, "warmup": "111 steps"}}),
        ("classify", "one_cycle.peak=0.3", {"one_cycle": {"peak": 0.3}}),
        ("caption", "constant.rate=0.3", {"constant": {"rate": 0.3}}),
    ],
)
def test_a_field_of_a_schedule_can_be_set_where_the_file_has_none(
    tmp_path: Path, recipe: str, override: str, schedule: Mapping[str, Any]
) -> None:
    job = default_job(tmp_path / "job.yaml", recipe, f"train.schedule.{override}")
    assert job.train == TrainSettings.model_validate({**job.train.model_dump(), "schedule": schedule})


def test_a_field_of_another_kind_does_not_borrow_from_the_default(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"train\.schedule\.noam\.warmup is required"):
        default_job(tmp_path / "job.yaml", "classify", "train.schedule.noam.peak=0.3")


def test_an_evaluation_interval_by_default_is_at_most_a_fifth_of_the_run(tmp_path: Path) -> None:
    every = [
        str(default_job(tmp_path / "job.yaml", "translate", duration=duration).evaluate.every)
        for duration in ("50000 steps", "2000 steps", "300 steps", "1 step", "3 epochs")
    ]
    assert every == ["1000 steps", "400 steps", "100 steps", "100 steps", "1000 steps"]
