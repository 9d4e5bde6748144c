"""The boot script of EC2 machines, and what it asks of AWS; tests/end_to_end/test_on_aws.py runs it as a whole."""

from __future__ import annotations

import ast
import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs
from uuid import uuid4

import pytest

import packtrain.fleet.aws
from packtrain.errors import Mistake
from packtrain.files import sha256_of
from packtrain.fleet.aws.fleet import AwsSettings, spot_notice
from packtrain.fleet.aws.instance import Refused, attach, fetch, note_volume, request, secret, tell, terminate
from packtrain.fleet.aws.launch import MAX_USER_DATA, boot_script, put_environment
from packtrain.node.preemption import PreemptionNotice
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from parts.metadata import metadata_server
from parts.runs import new_run
from parts.s3 import S3Server, fresh_location, leave_aws

BOOT = Path(packtrain.fleet.aws.__file__).with_name("boot.sh")
SETTINGS = {
    "region": "us-east-1",
    "instances": ["g5.xlarge"],
    "role": "trainer",
    "volume": {"name": "imagenet", "size": "600 GB", "iops": 18000},
    "mounts": {"/data": "fs-0123:/"},
    "secrets": {"WANDB_API_KEY": "ssm:/team/wandb"},
}


@pytest.fixture
def settings() -> AwsSettings:
    return AwsSettings.model_validate(SETTINGS)


def serve(server: ThreadingHTTPServer) -> str:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def machine(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The metadata of a machine, in files."""
    root = tmp_path / "metadata"
    keys = {"AccessKeyId": "AKROLE", "SecretAccessKey": "secret", "Token": "session"}
    entries = {
        "instance-id": "i-1",
        "placement/region": "us-east-1",
        "placement/availability-zone": "us-east-1a",
        "iam/security-credentials/trainer": json.dumps(keys),
    }
    for path, text in entries.items():
        put(root, path, text)
    leave_aws(monkeypatch)
    server = metadata_server(root, "127.0.0.1", 0)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", serve(server))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield root
    server.shutdown()


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.usefixtures("processes")
def test_the_script_is_valid_and_small_enough_and_the_same_each_time(
    settings: AwsSettings, directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store)
    script = tmp_path / "boot.sh"
    script.write_text(boot_script(run, settings, 1_800_000_000.0))
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert len(gzip.compress(script.read_bytes())) < MAX_USER_DATA * 0.8
    assert script.read_text() == boot_script(run, settings, 1_800_000_000.0)


def test_the_script_has_the_values_of_the_run_and_only_names_of_secrets(
    settings: AwsSettings, directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    monkeypatch.setenv("AWS_ENDPOINT_URL_IAM", "https://me:canary@iam.example")
    run = new_run(directory_store)
    text = boot_script(run, settings, 1_800_000_000.0)
    assert "canary" not in text
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:canary@example")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    with pytest.raises(Mistake, match=r"^AWS_ENDPOINT_URL: invalid URL; use .*, without keys$"):
        boot_script(run, settings, 1_800_000_000.0)
    assert "declare -A secrets=([WANDB_API_KEY]=ssm:/team/wandb)" in text
    assert "volume=(imagenet Size=600 VolumeType=gp3 Iops=18000)" in text
    assert "mounts=('fs-0123:/ /data')" in text
    assert f"command=(-P -m packtrain node {run.name} --store {run.store.url}" in text
    assert "\nends=1800000000\n" in text
    assert "\nlinger=600\n" in text


@pytest.mark.usefixtures("processes")
def test_a_machine_that_may_not_end_says_so_in_the_store(settings: AwsSettings, directory_store: Store) -> None:
    """Its group replaces it until somebody looks, or the scheduled end."""
    script = boot_script(new_run(directory_store), settings, 1_800_000_000.0)
    function = script[script.index("end_machine() {") : script.index("linger() {")]
    stubs = 'say() { :; }; power_off() { echo off; }; aws() { [ "$1" != terminate ] && printf "%s\\n" "$@"; }; run=r-1'
    done = subprocess.run(["bash", "-c", f"{stubs}\n{function}\nend_machine end"], capture_output=True, text=True)
    told = done.stdout.splitlines()
    assert (told[0], told[1], told[-1]) == ("tell", "r-1", "off"), done
    assert "run `packtrain down`, and add to its role the policy that `packtrain run --dry-run` prints" in told[2]


def test_the_environment_in_the_store_is_what_the_script_expects(
    settings: AwsSettings, directory_store: Store, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    put_environment(run, settings)
    monkeypatch.setenv("PACKTRAIN_STORE", run.store.url)
    fetch(run.key("environment.tar"), str(tmp_path / "fetched"))
    digest = subprocess.run(["sha256sum", tmp_path / "fetched"], capture_output=True, text=True).stdout.split()[0]
    assert f"\ndigest={digest}\n" in boot_script(run, settings, 1_800_000_000.0)
    listed = subprocess.run(["tar", "-tf", tmp_path / "fetched"], capture_output=True, text=True).stdout
    assert {"create.sh", "identity.py", "constraints.txt"} <= set(listed.split())
    assert machine.exists()


def test_the_part_in_python_runs_on_old_machines() -> None:
    """Ubuntu 20.04 has Python 3.8, and the script may have to say there that this is too old for Packtrain."""
    text = BOOT.with_name("instance.py").read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    used |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {str(name).partition(".")[0] for name in used} <= set(sys.stdlib_module_names)


ENVIRONMENT = """
set -euo pipefail
own=$PWD log=log environment=runs/a-1/environment.tar identity=0.1 mode=offline find='echo none' python='' as_user=(env)
fail() { echo "failed: $1"; exit 1; }; say() { :; }; aws() { cp made.tar "$3"; }
"""


def find_python(tmp_path: Path, digest: str) -> str:
    """Run the function of the boot script that finds or makes the Python, with an archive that only says where."""
    (tmp_path / "create.sh").write_text('cat > /dev/null; echo installing; echo "/cache/$1/$2/bin/python"\n')
    subprocess.run(["tar", "-cf", "made.tar", "create.sh"], cwd=tmp_path, check=True)
    text = BOOT.read_text()
    functions = text[text.index("# Stock images") : text.index("# The node.")]
    own = digest or sha256_of(tmp_path / "made.tar")
    script = f'{ENVIRONMENT}\ndigest={own}\n{functions}\nfind_python\necho "$python"\n'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path).stdout


@pytest.mark.usefixtures("processes")
def test_an_environment_is_made_only_of_what_the_client_has_put_into_the_store(tmp_path: Path) -> None:
    assert find_python(tmp_path, "") == "/cache/0.1/offline/bin/python\n"
    assert "not what the client has put there" in find_python(tmp_path, "0" * 64)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("signal", "said"), [("TERM", ""), ("0", "ended: end\n")])
def test_a_machine_that_is_ended_while_it_lingers_does_not_delete_its_group(signal: str, said: str) -> None:
    text = BOOT.read_text()
    function = text[text.index("linger() {") : text.index("problem=''")]
    head = "told=no linger=0.5; say() { :; }; end_machine() { echo ended: $1; }; trap told=yes TERM"
    script = f"set -euo pipefail\n{head}\n{function}\n(sleep 0.1; kill -{signal} $$) & linger broken"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


# Disks, on real block devices.

FAIL = "fail() { echo failed: $1; exit 1; }; say() { echo $*; }; log=log data=$PWD/data volume=()\n"


@pytest.fixture
def devices(needs_root: None, tmp_path: Path) -> Iterator[list[str]]:
    """Two blank disks."""
    attached = []
    for number in range(2):
        image = tmp_path / f"disk-{number}.img"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        made = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True, check=True)
        attached.append(made.stdout.strip())
    yield attached
    for device in attached:
        subprocess.run(["losetup", "-d", device], check=True)


@pytest.fixture
def device(devices: list[str]) -> str:
    return devices[0]


def prepare(device: str, tmp_path: Path, after: str = "") -> subprocess.CompletedProcess[str]:
    """Prepare this disk."""
    return run_disks(f"device=$1; find_disk() {{ disk=$device; }}; prepare_disk\n{after}", tmp_path, device)


def run_disks(commands: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run commands after the functions of the boot script for disks, with mounts of their own."""
    text = BOOT.read_text()
    functions = text[text.index("# Disks.") : text.index("mount_shares() {")]
    script = f"set -euo pipefail\n{FAIL}{functions}\n{commands}\n"
    command = ["unshare", "-m", "bash", "-c", script, "boot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_a_blank_disk_is_formatted_once_and_its_files_stay(device: str, tmp_path: Path) -> None:
    first = prepare(device, tmp_path, "echo kept > $data/file")
    assert first.returncode == 0, first.stderr
    assert f"formatting {device}" in first.stdout
    second = prepare(device, tmp_path, "cat $data/file")
    assert second.returncode == 0, second.stderr
    assert "formatting" not in second.stdout
    assert second.stdout.endswith("kept\n")


def test_a_disk_with_something_unknown_is_not_formatted(device: str, tmp_path: Path) -> None:
    subprocess.run(["mkswap", device], check=True, capture_output=True)
    done = prepare(device, tmp_path)
    assert done.returncode == 1
    assert "which is not blank" in done.stdout
    assert "formatting" not in done.stdout


def test_a_disk_with_data_but_no_file_system_is_not_formatted(device: str, tmp_path: Path) -> None:
    data = b"an archive without a file system".rjust(4096, b"\0")
    Path(device).write_bytes(data)
    done = prepare(device, tmp_path)
    assert done.returncode == 1
    assert "which is not blank" in done.stdout
    with Path(device).open("rb") as disk:
        assert disk.read(len(data)) == data


@pytest.mark.usefixtures("processes")
def test_a_disk_that_cannot_be_read_is_not_formatted(tmp_path: Path) -> None:
    done = prepare("/dev/no-such-disk", tmp_path)
    assert done.returncode != 0
    assert "formatting" not in done.stdout


# This kernel has no RAID: mdadm only says what it was asked for.
RAID = """
instance_disks() { printf '%s\\n' "${given[@]}"; }
mdadm() { echo "mdadm $*"; }
given=("$@")
find_disk
"""


def test_blank_disks_of_the_instance_store_become_one(devices: list[str], tmp_path: Path) -> None:
    done = run_disks(RAID, tmp_path, *devices)
    assert done.returncode == 0, done.stderr
    assert f"--create /dev/md/packtrain --run --level=0 --raid-devices=2 {' '.join(devices)}" in done.stdout


def test_disks_of_the_instance_store_with_data_do_not_become_one(devices: list[str], tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", devices[1]], check=True, capture_output=True)
    done = run_disks(RAID, tmp_path, *devices)
    assert done.returncode == 0, done.stderr
    assert "--create" not in done.stdout


@pytest.mark.usefixtures("processes")
def test_of_what_earlier_runs_left_on_a_volume_only_files_of_packs_stay(tmp_path: Path) -> None:
    """Any of them could have put a Python there that says that it is this Packtrain."""
    shard = f"cache/packtrain/packs/{'a1' * 32}"
    theirs = (
        "home/.bashrc", "notes.txt", "cache/pip/x", "cache/packtrain/environments/1-abc/bin/python",
        "cache/packtrain/code/d/a.py", f"{shard}.lock", "cache/packtrain/packs/uses/x",
        f"cache/packtrain/packs/{'b2' * 32}/x",
    )  # fmt: skip
    data, text = tmp_path / "data", BOOT.read_text()

    def boot(volume: str, machine: str, fill: bool = True) -> set[str]:
        for name in (shard, *theirs) if fill else ():
            put(data, name, "theirs")
        function = text[text.index("forget_others() {") : text.index("# Workers run as a user")]
        head = f"set -euo pipefail\nown=$1/own data=$1/data volume=({volume})\naws() {{ echo {machine}; }}\n"
        command = ["bash", "-c", f"{head}{function}\nforget_others\n", "boot", str(tmp_path)]
        subprocess.run(command, check=True)
        return {str(path.relative_to(data)) for path in data.rglob("*") if not path.is_dir()}

    (tmp_path / "own").mkdir()
    assert boot("", "i-1") == {shard, *theirs}, "the disk is this machine's own"
    assert boot("imagenet Size=600", "i-1") == {shard}
    assert boot("imagenet Size=600", "i-1") == {shard, *theirs}, "after a reboot they are this run's"
    assert boot("imagenet Size=600", "i-2") == {shard}, "of an image that was made of the first one"
    put(tmp_path, f"machine/packtrain/packs/{'a1' * 32}", "the machine's own")
    for number, link in enumerate(("cache/packtrain/packs", "cache/packtrain", "cache", "home", "."), 3):
        (data / link).mkdir(parents=True, exist_ok=True)
        shutil.rmtree(data / link)
        (data / link).symlink_to(tmp_path / "machine")
        assert boot("imagenet Size=600", f"i-{number}", fill=False) <= {shard}, link
        assert not (data / link).is_symlink(), link
        assert [path.name for path in (tmp_path / "machine").rglob("*")] == ["packtrain", "packs", "a1" * 32], link
    assert text.index("\nprepare_disk\n") < text.index("\nforget_others ") < text.index("\nmount_shares\n")


# Requests.


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make AWS mean this server, beside the metadata service of the tests."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def test_requests_are_signed_as_a_strict_server_wants_it(
    ceph_server: S3Server, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(ceph_server, monkeypatch)
    store = open_store(fresh_location())
    store.put("runs/a b-1/environment.tar", b"data")
    monkeypatch.setenv("PACKTRAIN_STORE", store.url)
    fetch("runs/a b-1/environment.tar", str(tmp_path / "fetched"))
    assert (tmp_path / "fetched").read_bytes() == b"data"
    tell("a-1", "cannot mount /dev/xvdf")
    [event] = Run(store, "a-1").events().read()
    assert (event.kind, event.text) == ("failure", "machine i-1: cannot mount /dev/xvdf")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(Refused, match="SignatureDoesNotMatch"):
        fetch("runs/a b-1/environment.tar", str(tmp_path / "fetched"))
    assert machine.exists()


def test_secrets_come_from_parameters_and_from_secrets_manager(
    moto_server: S3Server, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    use(moto_server, monkeypatch)
    client = {"endpoint_url": moto_server.endpoint, "region_name": "us-east-1"}
    team = uuid4().hex  # the tests of other files have parameters in the same server
    boto3.client("ssm", **client).put_parameter(Name=f"/{team}/wandb", Value="héllo", Type="SecureString")
    boto3.client("secretsmanager", **client).create_secret(Name=f"{team}/token", SecretString="token")
    assert secret(f"ssm:/{team}/wandb") == "héllo"
    assert secret(f"secretsmanager:{team}/token") == "token"
    with pytest.raises(Refused, match="ParameterNotFound"):
        secret(f"ssm:/{team}/other")
    assert machine.exists()


class FakeAws(BaseHTTPRequestHandler):
    """Volumes that others may take meanwhile, which moto does not know. `asked` are the requests, in order."""

    volumes: dict[str, str]
    attached: list[str]
    taken: set[str]
    gone: set[str]
    asked: list[dict[str, str]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        values = {name: value for name, [value] in parse_qs(body).items()}
        self.asked.append(values)
        action = re.sub(r"(?<!^)(?=[A-Z])", "_", values["Action"]).lower()
        status, text = getattr(self, action)(values)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def describe_volumes(self, values: dict[str, str]) -> tuple[int, str]:
        free = values.get("Filter.2.Name") == "status"
        mine = values.get("Filter.2.Name") == "attachment.instance-id"
        seen = self.attached if mine else [name for name, it in self.volumes.items() if not (free and it == "in-use")]
        item = (
            "<item><tagSet><item><key>Name</key><value>{1}</value></item></tagSet><volumeId>{0}</volumeId>"
            "<attachmentSet><item><volumeId>{0}</volumeId></item></attachmentSet></item>"
        )
        items = "".join(item.format(name, name[4:]) for name in seen)
        return 200, f'<a xmlns="http://ec2.amazonaws.com/doc/2016-11-15"><volumeSet>{items}</volumeSet></a>'

    def attach_volume(self, values: dict[str, str]) -> tuple[int, str]:
        name = values["VolumeId"]
        if name in self.gone:
            return 400, "<Code>InvalidVolume.NotFound</Code><Message>it does not exist</Message>"
        if name in self.taken:
            return 400, "<Code>VolumeInUse</Code><Message>another machine was faster</Message>"
        self.volumes[name] = "in-use"
        self.attached.append(name)
        return 200, "<status>attaching</status>"

    def create_volume(self, values: dict[str, str]) -> tuple[int, str]:
        name = f"vol-{values['TagSpecification.1.Tag.1.Value']}"
        made = [asked["ClientToken"] for asked in self.asked if asked["Action"] == "CreateVolume"]
        if name in self.gone and len(set(made)) == 1:
            return 200, f"<volumeId>{name}</volumeId>"
        name = f"{name}-again" if name in self.gone else name
        self.volumes[name] = "available"
        return 200, f"<volumeId>{name}</volumeId>"

    def describe_auto_scaling_instances(self, _: dict[str, str]) -> tuple[int, str]:
        return 200, "<AutoScalingGroupName>packtrain-a-1</AutoScalingGroupName>"

    def describe_auto_scaling_groups(self, _: dict[str, str]) -> tuple[int, str]:
        states = dict(word.split() for word in self.taken)
        alive = sum(state == "InService" for state in states.values())
        member = "<member><InstanceId>{}</InstanceId><LifecycleState>{}</LifecycleState></member>"
        machines = "".join(member.format(*item) for item in states.items())
        return 200, f"<DesiredCapacity>{alive}</DesiredCapacity><Instances>{machines}</Instances>"

    def _done(self, _: dict[str, str]) -> tuple[int, str]:
        return 200, ""

    delete_auto_scaling_group = delete_launch_template = _done

    def terminate_instance_in_auto_scaling_group(self, _: dict[str, str]) -> tuple[int, str]:
        if "together" in self.gone:  # all machines of the group do so at this moment
            type(self).taken = {f"{word.split()[0]} Terminating" for word in self.taken}
        return 200, ""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def aws(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeAws]]:
    assert machine.exists()
    handler = type("Handler", (FakeAws,), {"volumes": {}, "attached": [], "taken": set(), "gone": set(), "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    monkeypatch.setenv("AWS_ENDPOINT_URL", serve(server))
    yield handler
    server.shutdown()


def test_a_machine_takes_the_next_volume_if_another_was_faster(aws: type[FakeAws]) -> None:
    aws.volumes |= {"vol-data_0": "in-use", "vol-data_1": "available", "vol-data_2": "available"}
    aws.volumes["vol-data_of_others_0"] = "available"
    aws.taken.add("vol-data_1")
    assert attach("data") == "vol-data_2"


def test_a_machine_records_its_volume_in_the_run(
    aws: type[FakeAws], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    monkeypatch.setenv("PACKTRAIN_STORE", store.url)
    aws.volumes |= {"vol-data_0": "in-use", "vol-data_1": "available"}
    assert attach("data") == attach("data") == "vol-data_1", "also after a restart of the machine"
    for _ in range(2):
        note_volume("job-1", "data")
    assert [entry.key for entry in store.list("runs")] == ["runs/job-1/volumes/vol-data_1"]


def test_a_volume_is_made_if_none_is_free(aws: type[FakeAws]) -> None:
    aws.volumes |= {"vol-data_0": "in-use", "vol-data_2": "in-use"}
    assert attach("data", SnapshotId="snap-1", VolumeType="gp3") == "vol-data_1"
    [made] = [asked for asked in aws.asked if asked["Action"] == "CreateVolume"]
    assert (made["SnapshotId"], made["VolumeType"], made["AvailabilityZone"]) == ("snap-1", "gp3", "us-east-1a")
    assert made["TagSpecification.1.Tag.1.Value"] == "data_1"
    assert len(made["ClientToken"]) == 64


def test_a_volume_that_was_deleted_is_made_again(aws: type[FakeAws], monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2 gives the old one for the old token."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    aws.gone.add("vol-data_0")
    assert attach("data", Size=10) == "vol-data_0-again"
    tokens = {asked["ClientToken"] for asked in aws.asked if asked["Action"] == "CreateVolume"}
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("replace", "machines", "calls"),
    [
        (False, {"i-1 InService", "i-2 InService"}, ["TerminateInstanceInAutoScalingGroup true"]),
        (True, {"i-1 InService", "i-2 InService"}, ["TerminateInstanceInAutoScalingGroup false"]),
        (True, {"i-1 InService"}, ["TerminateInstanceInAutoScalingGroup false"]),
        (False, {"i-1 InService"}, ["DeleteLaunchTemplate ", "DeleteAutoScalingGroup "]),
        (False, {"i-1 InService", "i-2 Terminating"}, ["DeleteLaunchTemplate ", "DeleteAutoScalingGroup "]),
    ],
)
def test_the_group_shrinks_unless_the_machine_is_to_be_replaced_and_goes_with_the_last(
    aws: type[FakeAws], replace: bool, machines: set[str], calls: list[str]
) -> None:
    aws.taken |= machines
    terminate(replace)
    assert changes(aws) == calls


def test_of_machines_that_end_at_the_same_time_one_deletes_the_group(aws: type[FakeAws]) -> None:
    aws.taken |= {"i-1 InService", "i-2 InService"}
    aws.gone.add("together")
    terminate(replace=False)
    assert changes(aws) == [
        "TerminateInstanceInAutoScalingGroup true", "DeleteLaunchTemplate ", "DeleteAutoScalingGroup ",
    ]  # fmt: skip


def changes(aws: type[FakeAws]) -> list[str]:
    changed = [asked for asked in aws.asked if not asked["Action"].startswith("Describe")]
    return [f"{one['Action']} {one.get('ShouldDecrementDesiredCapacity', '')}" for one in changed]


def test_a_server_that_refuses_is_not_asked_again(aws: type[FakeAws]) -> None:
    aws.taken.add("vol-a")
    with pytest.raises(Refused, match="VolumeInUse: another machine was faster"):
        request("ec2", "POST", "/", b"Action=AttachVolume&VolumeId=vol-a")
    assert len(aws.asked) == 1


# Notices.


def test_the_notice_of_a_spot_machine_and_the_advice_before_it(machine: Path) -> None:
    assert spot_notice() is None
    put(machine, "events/recommendations/rebalance", '{"noticeTime": "2026-10-27T08:22:00Z"}')
    advice = spot_notice()
    assert advice is not None
    assert not advice.certain
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 100))
    put(machine, "spot/instance-action", json.dumps({"action": "terminate", "time": end}))
    notice = spot_notice()
    assert isinstance(notice, PreemptionNotice)
    assert notice.certain
    assert notice.reason == "preemption notice: EC2 will terminate this machine"
    assert 90 < (notice.seconds or 0) <= 101


def test_a_wrong_clock_does_not_make_the_notice_longer_than_two_minutes(machine: Path) -> None:
    put(machine, "spot/instance-action", '{"action": "stop", "time": "2099-01-01T00:00:00Z"}')
    notice = spot_notice()
    assert notice is not None
    assert notice.seconds == 120.0
