
set -eu
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
fail() { echo "$*" >&2; exit 1; }
if [ "$2" = gpu ]; then
  nvidia-smi -L >/dev/null 2>&1 || fail 'no NVIDIA driver; use an image that has one, or install it by post_install'
fi
[ "$1" != - ] || { echo ready; exit 0; }
if ! mountpoint -q "$1"; then
  # The largest disk that nothing uses: neither it nor a part of it is mounted or swap. Smaller ones are IBM's own,
  # with its metadata or the swap space.
  disk= most=2000000000
  for one in $(lsblk -dnpo NAME,TYPE | awk '$2 == "disk" { print $1 }'); do
    [ -z "$(lsblk -nro MOUNTPOINT "$one" | tr -d ' \n')" ] || continue
    size=$(lsblk -dnbo SIZE "$one")
    [ "$size" -le "$most" ] || { most=$size; disk=$one; }
  done
  [ -n "$disk" ] || fail 'no second disk that is free; remove it from fleet.ibm.disks, or look with `lsblk`'
  [ "$(lsblk -nro NAME "$disk" | wc -l)" = 1 ] || fail "$disk has partitions; it was not touched"
  if [ -z "$(root blkid -p -o value -s TYPE "$disk" || true)" ]; then
    # blkid knows file systems, not data: a disk that was written to without one is not blank.
    [ "$(root head -c 1048576 "$disk" | tr -d '\0' | head -c 1 | wc -c)" = 0 ] ||
      fail "$disk has no file system but is not blank; it was not touched"
    root mkfs.ext4 -q -F -L packtrain "$disk" >&2
  fi
  root mkdir -p "$1"
  root mount -o noatime "$disk" "$1"
fi
root mkdir -p "$1/packtrain"; root chown "$(id -u):$(id -g)" "$1/packtrain"; chmod 700 "$1/packtrain"
echo ready
