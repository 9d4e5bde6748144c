#!/bin/sh
# Installs Packtrain @identity@ for Python @python@ without a network:  sh install.sh [DIRECTORY]
set -eu
fail() { echo "install.sh: $1" >&2; exit 1; }
directory=${1:-environment}
case $directory in /*) ;; *) [ $# -eq 0 ] || directory=$PWD/$directory ;; esac
cd "$(dirname "$0")"
case $directory in /*) ;; *) directory=$PWD/$directory ;; esac
[ -f SHA256SUMS ] || fail 'SHA256SUMS is missing, so the bundle is incomplete; copy it and unpack it again'
sha256sum --check --quiet SHA256SUMS >&2 || fail 'the bundle is damaged; copy it and unpack it again'
[ "$(uname -m)" = @machine@ ] || fail "this machine is $(uname -m), and the bundle is for @machine@"
for python in python@python@ python3 none; do
  "$python" -I -c 'import sys, venv; sys.exit(sys.version_info[:2] != (@version@))' 2>/dev/null && break
done
[ "$python" != none ] || fail 'no Python @python@ here; install it, or make the bundle with --python'
"$python" -I -m venv --clear --without-pip "$directory"
pip() { "$directory/bin/python" tools/@pip@/pip @install@ --require-hashes "$@"; }
pip --find-links wheels --requirement requirements.txt
echo "own/@own@ --hash=sha256:@own_digest@" > "$directory/own.txt"
pip --requirement "$directory/own.txt"
rm "$directory/own.txt"
# Only a store that was created is one: an empty mount point must not be taken for it.
"$directory/bin/python" -I -c 'from packtrain.store import open_store; open_store("store", create=True)'
program=$directory/bin/packtrain
case ":$PATH:" in
  *":$HOME/.local/bin:"*)
    if [ -L "$HOME/.local/bin/packtrain" ] || [ ! -e "$HOME/.local/bin/packtrain" ]; then
      mkdir -p "$HOME/.local/bin" && ln -sfn "$program" "$HOME/.local/bin/packtrain" && program=packtrain
    fi ;;
esac
echo "Installed $("$directory/bin/packtrain" --version) in $directory"
@hints@
