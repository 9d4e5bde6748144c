
set -eu
expected=$1
@fits@
umask 077
home="@environments@"; mkdir -p "$home"
part=$(mktemp -d "$home/part-XXXXXX"); trap 'rm -rf "$part"' EXIT
if [ -n "${3:-}" ]; then # without the bundle's store, which may be large
  tar -x -C "$part" -f "$3" --strip-components 1 --wildcards --exclude '*/store/*' --exclude '*/job/*'
  (cd "$part" && sha256sum --check --quiet --ignore-missing @sums@ >&2) || { echo "$3 is damaged" >&2; exit 1; }
else
  tar -x -C "$part"
fi
mkdir -p "$part/wheels"
lock=$part/@lock@
if [ -f "$lock" ]; then # a bundle is for one version of Python, and brings pip
  wanted=$(sed -n '1s/^# Python \([0-9.]*\) .*/\1/p' "$lock")
  pythons="python$wanted python3" check='import sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])'
else
  wanted='>= 3.11 with venv' pythons="python3.13 python3.12 python3.11 python3"
  check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
fi
for python in $pythons none; do
  "$python" -I -c "$check" "$wanted" 2>/dev/null && break
done
[ "$python" != none ] || { echo "no Python $wanted; install one, or set python in the fleet" >&2; exit 1; }
# By its path, never by its name: an index or a bundle may have another, newer package of that name, and the node that
# starts from this environment is sent the job's secrets.
wheel=$(echo "$part"/own/*.whl)
if [ -f "$lock" ]; then
  "$python" -I -m venv --without-pip "$part/made"
  pip() { "$part/made/bin/python" "$(echo "$part"/@tools@/pip-*.whl)/pip" @install@ "$@" >&2; }
  pip --require-hashes --find-links "$part/wheels" --requirement "$lock"
  pip "$wheel"
else
  "$python" -I -m venv "$part/made"
  offline=; [ "$2" = offline ] && offline=--no-index
  "$part/made/bin/python" -I -m pip install --quiet --disable-pip-version-check --no-input $offline \
    --only-binary :all: --find-links "$part/wheels" --constraint "$part/constraints.txt" "$wheel[train]" \
    > "$part/errors" 2>&1 || {
    cat "$part/errors" >&2
    # pip's last words are that a package does not exist.
    ! grep -Eq '@no_index@' "$part/errors" || echo 'cannot reach the package index from there;' \
      'make a bundle with `packtrain bundle JOB` and set fleet.ssh.bundle, or set python in the fleet' >&2
    exit 1
  }
fi
# With a Python that has none of these packages: as soon as theirs starts, it may run code of them.
[ -f "$lock" ] || \
  "$python" -I "$part/identity.py" "$(echo "$part"/made/lib/python*/site-packages)" < "$part/digests.txt" >&2
fits "$part/made/bin/python" || { echo 'the new environment does not have this Packtrain' >&2; exit 1; }
made="$home/$expected"
if ! mv -T "$part/made" "$made" 2>/dev/null && ! fits "$made/bin/python"; then
  # What is there was interrupted, and another run may be replacing it, too: then one of them fails here, and either
  # environment will do.
  mv -T "$made" "$part/old" 2>/dev/null || true
  mv -T "$part/made" "$made" 2>/dev/null || fits "$made/bin/python"
fi
echo "$made/bin/python"
