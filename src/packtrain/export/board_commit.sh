echo packtrain-answer
altered=
while [ $# -gt 0 ]; do
  [ -f "$stage/$1" ] && [ "$(sum "$stage/$1")" = "$2" ] || { echo "altered $1"; altered=yes; }
  shift 2
done
[ -z "$altered" ] || exit 0
rm -rf "$stage/.sender" ".$name.old"
find "$stage" -depth -type d -exec rmdir {} \; 2>/dev/null
sync -f "$stage" 2>/dev/null || sync  # a board may lose its power at any moment
rmdir "$name" 2>/dev/null
if [ ! -e "$name" ]; then mv "$stage" "$name" || exit 1
elif python3 -I -c '
import ctypes, os, sys
first, second = map(os.fsencode, sys.argv[1:])
sys.exit(ctypes.CDLL(None).renameat2(-100, first, -100, second, 2) != 0)' "$stage" "$name" 2>/dev/null
then rm -rf "$stage"
else
  mv "$name" ".$name.old" || exit 1
  mv "$stage" "$name" || { mv ".$name.old" "$name"; exit 1; }
  rm -rf ".$name.old"
fi
echo done
