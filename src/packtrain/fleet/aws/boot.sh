set -euo pipefail
export HOME=/root
own=/opt/packtrain data=/mnt/packtrain user=packtrain log=/var/log/packtrain.log
mkdir -p "$own"

# A unit of its own, so that cloud-init can finish, the machine may reboot, and a shutdown lets the node commit.
if [ -d /run/systemd/system ] && [ -z "${PACKTRAIN_UNIT:-}" ]; then
  install -m 700 "$0" "$own/boot"
  cat > /etc/systemd/system/packtrain.service <<UNIT
[Unit]
Description=Packtrain: $run
Wants=network-online.target
After=network-online.target
[Service]
Environment=PACKTRAIN_UNIT=1
ExecStart=/bin/bash $own/boot
Restart=on-abnormal
KillMode=mixed
TimeoutStopSec=110
LimitNOFILE=1048576
LimitMEMLOCK=infinity
[Install]
WantedBy=multi-user.target
UNIT
  systemctl daemon-reload
  exec systemctl enable --now --no-block packtrain.service
fi

exec > >(tee -a "$log" > /dev/console 2>/dev/null || cat >> "$log") 2>&1
say() { echo "$(date -u +%FT%TZ) $*"; }

echo "$instance" > "$own/instance.py"
aws() { python3 -I "$own/instance.py" "$@"; }

# The end of the machine. Every way through this script leads here.

power_off() { systemctl poweroff || shutdown -P now || poweroff -f; }

# $1: `end`, and the group becomes smaller by one, or `replace`, and it starts another machine.
end_machine() {
  over=yes
  say "ending this machine ($1)"
  aws terminate "$1" || {
    problem='cannot end through Auto Scaling, so the group replaces it: run `packtrain down`, and add to its role'
    say "$problem"
    aws tell "$run" "$problem the policy that \`packtrain run --dry-run\` prints" || true
  }
  power_off
  exit 0
}

linger() {
  say "failed: $1; this machine stays for $linger s to look at, then it ends"
  sleep "$linger" & wait $! || true
  # It is ending already. Its group may be needed: somebody may have resumed the run.
  [ "$told" = no ] || exit 0
  end_machine end
}

problem='' over=no told=no node=''
fail() { problem=$1; exit 1; }
after_exit() {
  trap - EXIT
  set +e
  if [ "$over" = yes ] || [ "$told" = yes ]; then exit 0; fi
  problem=${problem:-"the boot script failed; see $log on the machine, or its console output"}
  aws tell "$run" "$problem"
  linger "$problem"
}
trap after_exit EXIT
# The machine is shutting down, or somebody stops the unit: the node commits.
trap 'told=yes; [ -z "$node" ] || kill -TERM "$node" 2>/dev/null' TERM

# Even if everything below hangs, the machine does not outlive the budget.
left=$(( (ends - $(date +%s)) / 60 ))
[ "$left" -gt 0 ] || end_machine end
shutdown -P "+$((left + 5))" 'the budget is used up' || say 'warning: cannot schedule a shutdown'

# Disks.

# True if a disk holds nothing: no file system, no partition, and no data without them. A disk that cannot be read
# counts as full.
is_blank() {
  local found
  found=$(wipefs "$1") && [ -z "$found" ] && [ "$(lsblk -nro NAME "$1" | wc -l)" -eq 1 ] &&
    [ "$(head -c 1048576 "$1" | tr -d '\0' | wc -c)" -eq 0 ]
}

are_blank() {
  local one
  for one in "$@"; do is_blank "$one" || return 1; done
}

instance_disks() { readlink -f /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_* 2>/dev/null | sort -u; }

# Sets `disk` to the one that the data goes to; empty: the root disk.
find_disk() {
  disk=''
  if [ "${#volume[@]}" -gt 0 ]; then
    disk=$(aws claim "${volume[@]}") || fail "cannot attach a volume ${volume[0]}_*; see $log"
    disk=$(readlink -f "$disk")
    return
  fi
  local disks
  mapfile -t disks < <(instance_disks | grep -v '[*]')
  if [ "${#disks[@]}" -gt 1 ] && command -v mdadm >/dev/null; then
    mdadm --assemble --scan 2>/dev/null || true # after a reboot
    if [ ! -e /dev/md/packtrain ] && are_blank "${disks[@]}"; then
      mdadm --create /dev/md/packtrain --run --level=0 --raid-devices="${#disks[@]}" "${disks[@]}"
    fi
    [ ! -e /dev/md/packtrain ] || { disk=$(readlink -f /dev/md/packtrain); return; }
  fi
  disk=${disks[0]:-}
}

prepare_disk() {
  local disk mounted part
  find_disk
  if [ -z "$disk" ]; then mkdir -p "$data"; return; fi
  mounted=$(lsblk -nro MOUNTPOINT "$disk" | grep -m 1 . || true)
  if [ "$mounted" = "$data" ]; then return; fi # this script was started again
  # Some images mount the instance store by themselves.
  if [ -n "$mounted" ]; then data=$mounted/packtrain; mkdir -p "$data"; return; fi
  if is_blank "$disk"; then
    say "formatting $disk, which is blank"
    mkfs.ext4 -q -m 0 -L packtrain "$disk"
  fi
  part=$(lsblk -nrpo NAME,FSTYPE "$disk" | awk 'NF > 1 { print $1; exit }')
  mkdir -p "$data"
  mount -o noatime,nosuid,nodev "${part:-$disk}" "$data" || fail "cannot mount $disk, which is not blank; see $log"
  resize2fs "${part:-$disk}" >/dev/null 2>&1 || true # a volume may be larger than its snapshot
}

mount_shares() {
  local share source path
  for share in "${mounts[@]}"; do
    source=${share%% *} path=${share#* }
    case $source in
      fs-*:*)
        source=${source%%:*}.efs.$(aws metadata placement/region).$(aws metadata services/domain):${source#*:}
        ;;
    esac
    mountpoint -q "$path" && continue
    command -v mount.nfs4 >/dev/null || fail "cannot mount $source: install nfs-common or nfs-utils in the AMI"
    mkdir -p "$path"
    mount -t nfs4 -o nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport "$source" "$path" ||
      fail "cannot mount $source on $path; check that its security group admits this machine"
  done
}

# Software.

check_driver() {
  grep -qs 0x10de /sys/bus/pci/devices/*/vendor || return 0
  nvidia-smi -L || fail 'this machine has an NVIDIA GPU, but its driver does not answer; use an AMI with the driver'
}

# What earlier runs have left on a volume may be anybody's: it is neither run nor read as settings. Only files of packs
# stay. They are named by their digests, and checked again because the lists of checked files go. A link is not followed:
# it may lead to this machine's own files. Once per machine (not per image): after a reboot, all is this run's own.
forget_others() {
  local mark kept
  if [ "${#volume[@]}" -eq 0 ]; then return; fi
  mark=$own/forgotten-$(aws metadata instance-id)
  if [ -e "$mark" ]; then return; fi
  [ ! -L "$data" ] || { rm "$data"; mkdir "$data"; }
  kept='[.]/(lost[+]found|cache(/packtrain(/packs)?)?)'
  (cd "$data" && find . -xdev -depth -mindepth 1 -regextype posix-extended \
    ! '(' -type d -regex "$kept" ')' ! '(' -type f -regex '[.]/cache/packtrain/packs/[0-9a-f]{64}' ')' -delete)
  touch "$mark"
}

# Workers run as a user without rights, of the same number on every machine: volumes go from one to the next.
prepare_user() {
  as_user=(setpriv --reuid="$user" --regid="$user" --init-groups env HOME="$data/home")
  id "$user" >/dev/null 2>&1 || useradd --uid 7225 --no-create-home --shell /bin/bash --home-dir "$data/home" "$user" ||
    useradd --no-create-home --shell /bin/bash --home-dir "$data/home" "$user"
  # Not PACKTRAIN_CACHE, which would take precedence over the job's fleet.cache.
  export XDG_CACHE_HOME=$data/cache
  mkdir -p "$XDG_CACHE_HOME" "$data/home"
  chmod 700 "$XDG_CACHE_HOME"
  [ "$(stat -c %U "$XDG_CACHE_HOME")" = "$user" ] || chown -R "$user:$user" "$XDG_CACHE_HOME"
  chown "$user:$user" "$data/home"
}

# Values go from the answer into the environment, and to no file, argument or log.
get_secrets() {
  local name value
  for name in "${!secrets[@]}"; do
    value=$(aws secret "${secrets[$name]}") || fail "cannot read ${secrets[$name]} for $name; check it and the role"
    export "$name=$value"
  done
}

# Stock images have a Python that cannot make an environment.
add_python() {
  local one
  for one in python3.13 python3.12 python3.11 python3; do
    "$one" -I -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
  done
  say 'installing Python with venv'
  if command -v apt-get >/dev/null; then
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q python3-venv
  else
    dnf install -y -q python3.11
  fi || say 'warning: cannot install it'
}

# Sets `python` to one with exactly the client's Packtrain.
find_python() {
  local archive=$own/environment.tar
  python=$("${as_user[@]}" sh -c "$find" find "$identity" $python)
  [ "$python" = none ] || return 0
  aws fetch "$environment" "$archive" || fail "cannot read $environment in $PACKTRAIN_STORE; check the role"
  [ "$(sha256sum < "$archive")" = "$digest  -" ] || fail "$environment is not what the client has put there; not run"
  [ "$mode" = offline ] || add_python
  say 'making the Python environment'
  tar -x -O -f "$archive" create.sh > "$own/create.sh"
  python=$("${as_user[@]}" sh "$own/create.sh" "$identity" "$mode" < "$archive" | tail -n 1) ||
    fail "cannot make the Python environment; see $log"
}

# The node.

# Starts the node again after a crash; a node that ends by itself says why by its exit code.
run_node() {
  local code crashes=0
  while :; do
    "${as_user[@]}" "$python" "${command[@]}" &
    node=$!
    while kill -0 "$node" 2>/dev/null; do wait "$node" || true; done # a signal ends the wait, but not the node
    code=0; wait "$node" || code=$?
    say "the node has ended with code $code"
    if [ "$told" = yes ]; then exit 0; fi # this machine is shutting down already
    case $code in
      @done@ | @stopped@ | @missing@) end_machine end ;;
      @failed@) linger 'the run has failed' ;;
      @mistake@)
        # Before it could join: nobody would see the log of this machine otherwise.
        aws tell "$run" "$(grep '^packtrain: ' "$log" | tail -n 1)" || true
        linger 'the node could not join the run'
        ;;
      @unfinished@) if aws noticed; then end_machine replace; else end_machine end; fi ;;
    esac
    crashes=$((crashes + 1))
    [ "$crashes" -le 3 ] || linger "the node has crashed $crashes times"
    sleep 10
  done
}

say "preparing this machine for $run"
command -v python3 >/dev/null || fail 'there is no python3; use an AMI with Python 3.11 or newer'
prepare_disk
forget_others # before shares are mounted, which are somebody's data
mount_shares
# Not before: the store may be on a share.
[ "${#volume[@]}" -eq 0 ] || aws note-volume "$run" "${volume[0]}" || say 'warning: cannot record the volume'
check_driver
prepare_user
get_secrets
find_python
say "starting the node of $run with $python"
export PACKTRAIN_NOTICE_SECONDS=100 # between the signal of a shutdown and the kill
run_node
