LC_ALL=C; export LC_ALL
parent=$1 name=$2 stage=$3; shift 3
if command -v sha256sum >/dev/null; then digest() { sha256sum <"$1"; }
elif command -v openssl >/dev/null; then digest() { openssl dgst -sha256 -r <"$1"; }
elif command -v python3 >/dev/null; then digest() { python3 -I -c '
import hashlib, sys
digest = hashlib.sha256()
for chunk in iter(lambda: sys.stdin.buffer.read(1 << 20), b""):
    digest.update(chunk)
print(digest.hexdigest())' <"$1"; }
else echo "neither sha256sum, openssl nor python3 is installed there" >&2; exit 1; fi
sum() { digest "$1" | cut -c 1-64; }
mkdir -p "$parent" && cd "$parent" || exit 1
