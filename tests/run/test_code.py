from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from packtrain.errors import Mistake, PacktrainError
from packtrain.run import code
from packtrain.run.code import archive, git_commit, snapshot, unpack
from parts.runs import program_job, read_files, write_files


def kept(directory: Path, back: Path) -> dict[str, bytes]:
    back.mkdir()
    unpack(snapshot(directory).archive, back)
    return read_files(back)


@pytest.fixture
def repository(processes: None, tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    subprocess.run(["git", "init", "-q", directory], check=True)
    return directory


def tar_of(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return zstandard.compress(buffer.getvalue())


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


# What goes in.


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", [".gitignore", ".packtrainignore"])
def test_a_pipe_in_place_of_a_list_of_files_is_refused_before_it_blocks(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(Mistake, match="is not a regular file"):
        snapshot(tmp_path)


@pytest.mark.usefixtures("processes")
def test_files_are_unpacked_as_they_were(tmp_path: Path) -> None:
    files = {"train.py": b"print()", "package/deep/module.py": b"", "data.bin": bytes(range(256)), "ä ö.txt": b"x"}
    write_files(tmp_path / "code", files)
    assert kept(tmp_path / "code", tmp_path / "back") == files


@pytest.mark.usefixtures("processes")
def test_a_script_stays_executable(tmp_path: Path) -> None:
    write_files(tmp_path / "code", {"run.sh": b"#!/bin/sh\n", "train.py": b""})
    (tmp_path / "code" / "run.sh").chmod(0o755)
    kept(tmp_path / "code", tmp_path / "back")
    assert os.access(tmp_path / "back" / "run.sh", os.X_OK)
    assert not (tmp_path / "back" / "train.py").stat().st_mode & 0o111


@pytest.mark.usefixtures("processes")
def test_the_same_files_give_the_same_bytes_whatever_their_times_and_order(tmp_path: Path) -> None:
    files = {"b.py": b"2", "a/c.py": b"3", "a.py": b"1"}
    write_files(tmp_path / "one", files)
    write_files(tmp_path / "other", dict(reversed(files.items())))
    os.utime(tmp_path / "other" / "b.py", (1, 1))
    assert snapshot(tmp_path / "one").archive == snapshot(tmp_path / "other").archive


def test_the_commit_of_code_is_known_and_how_many_files_have_changed(repository: Path) -> None:
    write_files(repository, {"train.py": b"", "lib/model.py": b""})
    assert git_commit(repository) == ("", 0), "nothing is committed yet"
    git = ["git", "-C", str(repository), "-c", "user.name=me", "-c", "user.email=me@here"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    write_files(repository, {"new.py": b""})
    assert git_commit(repository / "lib") == (commit, 0), "a file that git does not track is no change"
    filters_files(repository, "false")  # it is not used
    write_files(repository, {"train.py": b"1", "lib/model.py": b"2"})
    assert git_commit(repository) == (commit, 2)


def git_in(directory: Path) -> Callable[..., str]:
    """Return a function that runs git there, as the repository's own person."""
    options = ("-c", "user.name=me", "-c", "user.email=me@here", "-c", "protocol.file.allow=always")

    def git(*words: str) -> str:
        command = ["git", "-C", str(directory), *options, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git


def filters_files(repository: Path, program: str, name: str = "evil") -> None:
    git_in(repository)("config", f"filter.{name}.clean", f"{program}; cat")
    write_files(repository, {".gitattributes": f"*.py filter={name}\n".encode()})


def filters_files_by_an_odd_name(repository: Path, program: str) -> None:
    filters_files(repository, program, "a=b")


def filters_files_of_a_submodule(repository: Path, program: str) -> None:
    git = git_in(repository)
    git("submodule", "add", "-q", str(repository), "part")
    git("commit", "-qm", "with a part")
    filters_files(repository / "part", program)
    write_files(repository, {"part/train.py": b"changed"})


def monitors_files(repository: Path, program: str) -> None:
    git_in(repository)("config", "core.fsmonitor", program)


def has_a_hook(repository: Path, program: str) -> None:
    """Git runs it after it has noted in its index that a file has only been touched."""
    write_files(repository, {".git/hooks/post-index-change": f"#!/bin/sh\n{program}\n".encode()})
    (repository / ".git/hooks/post-index-change").chmod(0o755)
    os.utime(repository / "other.py", (1, 1))


def lacks_an_object(repository: Path, program: str) -> None:
    """Git fetches it from the server that the repository names, by the program that the repository names."""
    git = git_in(repository)
    for setting in (
        "core.repositoryFormatVersion=1", "extensions.partialClone=origin", "remote.origin.promisor=true",
        "remote.origin.url=ssh://server/code", f"core.sshCommand={program}; false",
    ):  # fmt: skip
        git("config", *setting.split("=", 1))
    tree = git("rev-parse", "HEAD^{tree}")
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()


@pytest.mark.parametrize(
    "prepare",
    [
        filters_files, filters_files_by_an_odd_name, filters_files_of_a_submodule, monitors_files, has_a_hook,
        lacks_an_object,
    ],
)  # fmt: skip
def test_asking_for_the_commit_runs_no_program_of_the_repository(
    repository: Path, tmp_path: Path, prepare: Callable[[Path, str], None]
) -> None:
    write_files(repository, {"train.py": b"", "other.py": b""})
    git = git_in(repository)
    git("add", ".")
    git("commit", "-qm", "first")
    prepare(repository, f"touch {tmp_path / 'ran'}")
    write_files(repository, {"train.py": b"changed"})
    git_commit(repository)
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "-C", str(repository), "status"], capture_output=True, check=False)
    assert (tmp_path / "ran").exists(), "git runs it unless it is told not to"


@pytest.mark.usefixtures("processes")
def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == ("", 0)


def test_files_that_git_ignores_are_left_out(repository: Path, tmp_path: Path) -> None:
    write_files(
        repository,
        {"train.py": b"", "new.py": b"", ".gitignore": b"data/\n*.log\n", "data/big.bin": b"x", "out.log": b"x"},
    )
    subprocess.run(["git", "-C", repository, "add", "train.py"], check=True)
    assert kept(repository, tmp_path / "back").keys() == {"train.py", "new.py", ".gitignore"}


@pytest.mark.parametrize("ignored", ["scratch/", "*"], ids=["by name", "with everything"])
def test_a_directory_that_the_repository_around_it_ignores_is_taken_as_without_git(
    repository: Path, tmp_path: Path, ignored: str
) -> None:
    code = repository / "scratch" / "project"
    write_files(repository, {".gitignore": f"{ignored}\n".encode(), "other.py": b""})
    write_files(code, {"train.py": b"", ".gitignore": b"*.log\n", "out.log": b"x", "data/words.txt": b"x"})
    assert kept(code, tmp_path / "back").keys() == {"train.py", ".gitignore", "data/words.txt"}


@pytest.mark.usefixtures("processes")
def test_a_gitignore_counts_without_a_repository_as_git_reads_it(tmp_path: Path) -> None:
    files = {
        ".gitignore": b"# large\n/data/\n*.log\n!keep.log\nbuild/\n",
        "train.py": b"", "keep.log": b"", "lib/.gitignore": b"*.tmp\n!own.log\n", "lib/own.log": b"", "lib/data/a": b"",
    }  # fmt: skip
    ignored = {"data/big.bin": b"x", "data/keep.log": b"x", "lib/a.log": b"x", "lib/b.tmp": b"x", "lib/build/c": b"x"}
    for directory in (tmp_path / "plain", tmp_path / "repository"):
        write_files(directory, {**files, **ignored})
    subprocess.run(["git", "init", "-q", tmp_path / "repository"], check=True)
    assert snapshot(tmp_path / "plain").sizes == snapshot(tmp_path / "repository").sizes
    assert kept(tmp_path / "plain", tmp_path / "back").keys() == files.keys()
    assert snapshot(tmp_path / "plain").left_out["data/"] == "named in .gitignore"


@pytest.mark.usefixtures("processes")
def test_without_git_the_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "code", {"train.py": b"1", "lib/more.py": b"2"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kept(tmp_path / "code", tmp_path / "back") == {"train.py": b"1", "lib/more.py": b"2"}


def test_a_deleted_file_that_git_still_knows_is_no_error(repository: Path, tmp_path: Path) -> None:
    write_files(repository, {"train.py": b"", "old.py": b""})
    subprocess.run(["git", "-C", repository, "add", "."], check=True)
    (repository / "old.py").unlink()
    assert kept(repository, tmp_path / "back").keys() == {"train.py"}


KEY_FILES = (
    ".env", "deep/.env", ".env.production", "prod.env", ".envrc", ".netrc", "_netrc", ".authinfo.gpg", ".pgpass",
    ".my.cnf", ".htpasswd", ".bash_history", ".psql_history", ".python_history", ".zsh_profile", "host.pem",
    "HOST.PEM", "host.key", "AuthKey.p8", "store.p12", "store.pfx", "key.ppk", "store.jks", "debug.keystore",
    "backup.gpg", "id.age", "passwords.kdbx", "user.keytab", "office.ovpn", "office.rdp", "id_rsa", "id_ed25519.pub",
    "deploy_rsa", "deploy-ed25519", ".ssh/config", ".aws/credentials", ".docker/config.json", ".dockercfg",
    ".dockerconfigjson", ".kube/config", "kubeconfig", "kubeconfig.yaml", "prod.kubeconfig", ".huggingface/token",
    "hf_token", "hf_token.txt", ".hf_token", ".kaggle/kaggle.json", "kaggle.json", ".databrickscfg",
    ".databricks/token-cache.json", ".azure/msal_token_cache.json", ".gcloud/legacy",
    "application_default_credentials.json", "service-account-1.json", "service_account.json",
    "service_account_key.json", "client_secret_1.apps.json", "rootkey.csv", "new_user_credentials.csv",
    "dev_accessKeys.csv", ".oci/config",
    ".bluemix/config.json", "apikey.json", ".softlayer", ".boto", ".s3cfg", ".passwd-s3fs", "rclone.conf",
    "main.tfstate", "main.tfstate.backup", "prod.tfvars", ".terraformrc", ".terraform.d/credentials.tfrc.json",
    ".vault-token", ".vault_pass", "vault_pass.txt", "vault.yml", ".git-credentials", ".gitcookies", ".npmrc",
    ".yarnrc.yml", ".pypirc", "pip.conf", ".condarc", "NuGet.Config", "gradle.properties", "settings-security.xml",
    ".ngc", ".snowsql", "sftp-config.json", "sftp.json", "filezilla.xml", "WebServers.xml", ".msmtprc",
    "robomongo.json", "logins.json", "key4.db", "login.keychain-db", ".password-store/team.gpg", "database.yml",
    "wp-config.php", "master.key", "heroku.json", "kube_config", "kube-config.yml", "my.cnf", "netrc",
    ".gitcredentials", "cookies.txt", "cookies.sqlite", "pw.txt", ".modal.toml", "azureauth.json",
    "hf-token", "hftoken.txt", "gcp-key.json", "gcloud_key.json", "team-kubeconfig.yml", "kube.config", "krb5cc_1000",
    "ssh_host_rsa_key", "ansible_vault_pass.txt", ".netrc.bak", ".env-prod", ".env~", ".dev.vars", ".bashrc",
    ".profile", ".gitconfig", "pip.ini", "clearml.conf", "huggingface_token", "app-firebase-adminsdk-x.json",
    "openrc.sh", "clouds.yaml", ".smbcredentials", "youtube_cookies.txt", "github-recovery-codes.txt", ".mcp.json",
    ".lambda_cloud/lambda_keys",
)  # fmt: skip
NAMED_AFTER_KEYS = (
    "credentials", "credentials.json", "credentials.toml", "aws_credentials.csv", "secrets.yaml", "secrets.json",
    "my-secrets.ini", "token", "token.json", "github_token.txt", "wandb_token", "slack-token.txt",
    "tokens/token.bin", "my_token.txt", "jwt_token", "api_key.txt", "apikeys.yaml", "openai-key.txt",
    "my-gcp-key.json", "gcp_sa_key.json", "ssh_key", "deploy.key.txt", "access_keys.csv", "private_key",
    "private-key.der", "password.txt", "passwords.csv", "passwd", "db_password.conf", "auth.json",
    "my_creds.json", "wandb_key", "google-api-key.json", "signing_key.bin", "azure_key",
    "anthropic_key", "bot_token.txt", "mistral_key.txt", "runpod_key", ".token", "key.json", "github_pat.txt",
    "slack_webhook.txt", "smbcredentials", "privkey", "hmac_key", "sudo_pass", "sops-key.txt", "adc.json",
)  # fmt: skip


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "in git"])
def test_files_that_may_hold_keys_are_left_out(tmp_path: Path, repository: Path, tracked: bool) -> None:
    directory = repository if tracked else tmp_path / "plain"
    write_files(directory, {"train.py": b"", **dict.fromkeys(KEY_FILES, b"CANARY")})
    if tracked:
        subprocess.run(["git", "-C", directory, "add", "-f", "."], check=True)
    assert kept(directory, tmp_path / "back").keys() == {"train.py"}


def test_files_named_after_keys_are_left_out_unless_the_command_names_them(tmp_path: Path, repository: Path) -> None:
    for directory in (repository, tmp_path / "plain"):
        write_files(directory, {"train.py": b"", **dict.fromkeys(NAMED_AFTER_KEYS, b"CANARY")})
    assert kept(repository, tmp_path / "new").keys() == {"train.py"}  # nothing is added yet
    assert kept(tmp_path / "plain", tmp_path / "back").keys() == {"train.py"}
    subprocess.run(["git", "-C", repository, "add", "-f", "."], check=True)
    assert kept(repository, tmp_path / "tracked").keys() == {"train.py"}
    assert snapshot(repository, NAMED_AFTER_KEYS).sizes.keys() == {"train.py", *NAMED_AFTER_KEYS}


@pytest.mark.usefixtures("processes")
def test_code_and_data_of_real_projects_are_not_taken_for_keys(tmp_path: Path) -> None:
    names = (
        "tokenizer.json", "special_tokens_map.json", "tokens.txt", "added_tokens.json", "vocab.txt", "train.key.py",
        "keys.csv", "keyboard.json", "monkey.json", "authors.txt", "secret_santa.py", "token.py", "credentials.py",
        "passwords.R", "answer_keys.csv", "passenger.csv", "environment.yml", "config.yaml", "conf/base.yaml",
        "api-key.png", "hub.py", "hf_tokenizer.py", "kubeconfig.py", "vault_pass.sh", "keyboard.py", "secrets_test.py",
        "key_value.yaml", ".env.example", "credentials.json.sample", "next_token.json", "bos_token.txt",
        "token_ids.json", "token_counts.csv", "per_token_loss.csv", "data/en-sa.json", "user_keys.csv",
        "serviceaccount-v1.json", "keys.txt", "ppocr_keys_v1.txt", "mistral_tokens.bin", "profile.json", "passes.csv",
    )  # fmt: skip
    write_files(tmp_path / "code", dict.fromkeys(names, b""))
    assert kept(tmp_path / "code", tmp_path / "back").keys() == set(names)


def test_in_a_repository_what_git_does_not_track_is_taken_if_it_is_source_or_named(
    tmp_path: Path, repository: Path
) -> None:
    write_files(repository, {"train.py": b"", "new.py": b"", "run.sh": b"", "notes.txt": b"", "wg0.txt": b""})
    write_files(repository, {"conf/a.yaml": b"", "conf/b.yaml": b"", "extra/c.json": b"", "sweep.yaml": b""})
    subprocess.run(["git", "-C", repository, "add", "train.py"], check=True)
    command = ["train.py", "--config=conf/a.yaml", "--with", "./extra/", "sweep.yaml"]
    words = program_job(program=command).named_paths
    assert snapshot(repository, words).sizes.keys() == {
        "train.py", "new.py", "run.sh", "conf/a.yaml", "extra/c.json", "sweep.yaml",
    }  # fmt: skip
    write_files(repository, {".packtrainignore": b"!notes.txt\n"})
    taken = snapshot(repository, words)
    assert "notes.txt" in taken.sizes
    assert taken.left_out["wg0.txt"] == taken.left_out["conf/b.yaml"] == "not tracked by git or named in the job"


@pytest.mark.usefixtures("processes")
def test_a_file_that_is_no_secret_is_taken_if_the_directory_says_so(tmp_path: Path) -> None:
    write_files(tmp_path, {"train.py": b"", "tests/fake.pem": b"", "auth.json": b"", "lib/hub.py": TOKEN.encode()})
    write_files(tmp_path, {".packtrainignore": b"!tests/*.pem\n!auth.json\n!lib/hub.py\n"})
    assert snapshot(tmp_path).sizes.keys() == {
        ".packtrainignore", "train.py", "tests/fake.pem", "auth.json", "lib/hub.py",
    }  # fmt: skip


def test_hidden_folders_are_taken_only_if_git_tracks_them(tmp_path: Path, repository: Path) -> None:
    write_files(repository, {"train.py": b"", ".settings/train.toml": b"", ".config/gcloud/token.db": b"CANARY"})
    subprocess.run(["git", "-C", repository, "add", "train.py", ".settings"], check=True)
    assert kept(repository, tmp_path / "back").keys() == {"train.py", ".settings/train.toml"}
    write_files(tmp_path / "plain", {"train.py": b"", ".config/gcloud/token.db": b"CANARY"})
    assert kept(tmp_path / "plain", tmp_path / "plain-back").keys() == {"train.py"}


@pytest.mark.usefixtures("processes")
def test_a_file_that_only_its_owner_may_read_stays_so(tmp_path: Path) -> None:
    write_files(tmp_path / "code", {"private.txt": b"x", "shared.txt": b"x"})
    (tmp_path / "code/private.txt").chmod(0o600)
    (tmp_path / "code/shared.txt").chmod(0o664)
    kept(tmp_path / "code", tmp_path / "back")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "back").iterdir()}
    assert modes == {"private.txt": 0o600, "shared.txt": 0o644}


def test_a_repository_cannot_have_git_run_a_program(tmp_path: Path, repository: Path) -> None:
    ran, monitor = tmp_path / "ran", tmp_path / "monitor"
    write_files(tmp_path, {"monitor": f"#!/bin/sh\ntouch {ran}\n".encode(), "code/train.py": b""})
    monitor.chmod(0o755)
    git = ["git", "-C", str(repository)]
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", str(monitor)], check=True)
    subprocess.run([*git, "ls-files", "--others"], check=True, capture_output=True)
    assert ran.exists(), "git runs it unless it is told not to"
    ran.unlink()
    assert kept(repository, tmp_path / "back").keys() == {"train.py"}
    assert not ran.exists()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", [".git/config", "__pycache__/train.pyc", ".venv/bin/python", "x.egg-info/PKG-INFO"])
def test_caches_and_environments_are_left_out(tmp_path: Path, name: str) -> None:
    write_files(tmp_path / "code", {"train.py": b"", name: b"x"})
    assert kept(tmp_path / "code", tmp_path / "back").keys() == {"train.py"}


@pytest.mark.usefixtures("processes")
def test_symbolic_links_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, {"secret": b"CANARY", "elsewhere/module.py": b"CANARY", "code/train.py": b""})
    (tmp_path / "code" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "code" / "package").symlink_to(tmp_path / "elsewhere")
    assert kept(tmp_path / "code", tmp_path / "back").keys() == {"train.py"}


@pytest.mark.usefixtures("processes")
def test_too_much_code_is_refused_with_the_largest_file_named(tmp_path: Path) -> None:
    write_files(tmp_path, {"train.py": b"x" * 400, "weights.bin": b"x" * 700})
    with pytest.raises(Mistake, match=r"is 1\.1 kB, more than 1\.0 kB \(largest: weights\.bin\)"):
        snapshot(tmp_path, max_bytes=1000)


@pytest.mark.usefixtures("processes")
def test_code_of_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_PLACES", 5)
    write_files(tmp_path, {"train.py": b"", "a/b/one": b"", "a/b/two": b""})  # and the folders ., a and a/b
    with pytest.raises(Mistake, match=r"has more than 5 files and folders; point `code:` to a smaller directory"):
        snapshot(tmp_path)


TOKEN = "hf_" + "aB3" * 11 + "x"  # not a real one; in two parts, or the check would find it here


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "data", [f"token = '{TOKEN}'\n".encode(), b"\x00\xff binary " + TOKEN.encode(), TOKEN.encode("utf-16")]
)
def test_a_file_with_a_secret_is_refused_with_its_kind_and_how_to_leave_it_out(tmp_path: Path, data: bytes) -> None:
    write_files(tmp_path, {"train.py": b"", "lib/hub.py": data})
    with pytest.raises(Mistake) as refused:
        snapshot(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/lib/hub.py: contains a Hugging Face token, and code is copied")
    assert TOKEN not in str(refused.value)
    write_files(tmp_path, {".packtrainignore": b"# tokens\nlib/hub.py\n"})
    assert snapshot(tmp_path).sizes.keys() == {"train.py", ".packtrainignore"}


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "in git"])
def test_files_that_the_list_of_the_directory_names_are_left_out(
    tmp_path: Path, repository: Path, tracked: bool
) -> None:
    directory = repository if tracked else tmp_path / "plain"
    files = {"train.py": b"", "data/1.bin": b"x", "data/deep/2.bin": b"x", "notes.md": b"", "lib/old.md": b""}
    write_files(directory, {**files, ".packtrainignore": b"data/\n\n*.md\n"})
    if tracked:
        subprocess.run(["git", "-C", directory, "add", "."], check=True)
    assert kept(directory, tmp_path / "back").keys() == {"train.py", ".packtrainignore"}


def test_a_store_is_not_code_also_if_git_does_not_ignore_it(tmp_path: Path, repository: Path) -> None:
    write_files(repository, {"train.py": b"", "old/.packtrain-store": b"", "old/runs/x": b""})
    assert kept(repository, tmp_path / "back").keys() == {"train.py"}


@pytest.mark.parametrize("tracked", [False, True], ids=["plain", "in git"])
def test_a_store_is_not_code_whichever_directory_it_is_in(tmp_path: Path, repository: Path, tracked: bool) -> None:
    directory = repository if tracked else tmp_path / "plain"
    here = {".packtrain-store": b"", "runs/a-1/job.json": b"", "packs/a/manifest.json": b"", "files/0a": b""}
    copied = {"exp/copy/runs/a-1/code.tar.zst": b"", "exp/copy/runs/a-1/job.json": b""}
    write_files(directory, {"train.py": b"", "lib/runs/notes.txt": b"", **here, **copied})
    if tracked:
        subprocess.run(["git", "-C", directory, "add", "-f", "."], check=True)
    assert kept(directory, tmp_path / "back").keys() == {"train.py", "lib/runs/notes.txt"}


@pytest.mark.usefixtures("processes")
def test_what_was_taken_and_what_was_left_out_is_said(tmp_path: Path) -> None:
    files = {"train.py": b"12345", ".env": b"", "a.pem": b"", "b.pem": b"", "c.pem": b"", ".venv/bin/python": b""}
    write_files(
        tmp_path, {**files, ".cache/x/token": b"", "data/store/.packtrain-store": b"", "data/store/runs/x": b""}
    )
    (tmp_path / "link").symlink_to("train.py")
    found = snapshot(tmp_path)
    assert found.sizes == {"train.py": 5}
    assert found.left_out == {
        ".env": "may hold keys", "a.pem": "may hold keys", "b.pem": "may hold keys", "c.pem": "may hold keys",
        "link": "a link", ".cache/": "hidden, not tracked by git", ".venv/": "not code", "data/store/": "not code",
    }  # fmt: skip
    assert found.summary.startswith("1 file of code (5 B); left out: ")
    for words in ("1 more (may hold keys)", "link (a link)", ".cache/ (hidden, not tracked by git)"):
        assert words in found.summary
    assert ".venv" not in found.summary


# What comes out.

HOSTILE = {
    "an absolute name": (tarfile.TarInfo("/tmp/escaped"), b"x"),
    "a name that climbs": (tarfile.TarInfo("../escaped"), b"x"),
    "a name that climbs later": (tarfile.TarInfo("a/../../escaped"), b"x"),
    "a symbolic link": (special("link", tarfile.SYMTYPE, "/etc/passwd"), b""),
    "a hard link": (special("link", tarfile.LNKTYPE, "train.py"), b""),
    "a device": (special("null", tarfile.CHRTYPE), b""),
    "a pipe": (special("pipe", tarfile.FIFOTYPE), b""),
    "a directory": (special("folder", tarfile.DIRTYPE), b""),
    "a name that is too long": (tarfile.TarInfo("/".join("a" * 10_000)), b"x"),
    "a sparse file": (special("sparse", tarfile.GNUTYPE_SPARSE), b""),
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE)
def test_anything_but_regular_files_inside_the_directory_is_refused(
    tmp_path: Path, entry: tuple[tarfile.TarInfo, bytes]
) -> None:
    (tmp_path / "back").mkdir()
    with pytest.raises(PacktrainError, match=r"^the run's code .*; refusing it$"):
        unpack(tar_of((tarfile.TarInfo("train.py"), b""), entry), tmp_path / "back")
    assert read_files(tmp_path) == {}


@pytest.mark.parametrize(
    "names",
    [[str(number) for number in range(70)], ["/".join([str(number), *"d" * 30]) for number in range(3)]],
    ids=["files", "folders"],
)
def test_an_archive_of_too_many_files_or_folders_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    data = archive(dict.fromkeys(names, b""))
    unpack(data, tmp_path / "back")
    assert len(read_files(tmp_path / "back")) == len(names)
    assert code.MAX_PLACES < 70_000
    monkeypatch.setattr(code, "MAX_PLACES", 50)
    with pytest.raises(PacktrainError, match="has more than 50 files and folders; refusing it"):
        unpack(data, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_modes_of_an_archive_give_no_rights_to_others_and_no_user(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("train.py")
    entry.mode, entry.uid, entry.gid = 0o7777, 12345, 12345
    unpack(tar_of((entry, b"")), tmp_path)
    status = (tmp_path / "train.py").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o755, os.getuid())


def test_a_link_cannot_lead_a_later_file_outside(tmp_path: Path) -> None:
    (tmp_path / "back").mkdir()
    link = (special("door", tarfile.SYMTYPE, str(tmp_path)), b"")
    with pytest.raises(PacktrainError):
        unpack(tar_of(link, (tarfile.TarInfo("door/escaped"), b"x")), tmp_path / "back")
    assert read_files(tmp_path) == {}


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_decompression_bomb_is_refused_whatever_size_it_claims(tmp_path: Path, says_its_size: bool) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=says_its_size).compress(bytes(10_000_000))
    with pytest.raises(PacktrainError, match="is larger than"):
        unpack(bomb, tmp_path, max_bytes=100_000)
    assert read_files(tmp_path) == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not compressed",
        zstandard.compress(b"not a tar" * 100),
        archive({"train.py": b"x" * 5000})[:-10],
        tar_of((tarfile.TarInfo("a"), b"x"), (tarfile.TarInfo("a/b"), b"x")),
        tar_of((tarfile.TarInfo("."), b"x")),
    ],
    ids=["empty", "plain", "no tar", "cut off", "a file as a folder", "no name"],
)
def test_a_damaged_archive_is_an_error_in_one_line(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PacktrainError, match=r"^cannot unpack the run's code"):
        unpack(data, tmp_path)
