manifest=$1; shift
[ -w . ] || { echo "Permission denied" >&2; exit 1; }
echo packtrain-answer
if [ -L "$name" ]; then echo link; exit
elif [ -d "$name" ]; then
  if [ -f "$name/model.json" ] && [ "$(sum "$name/model.json")" = "$manifest" ]; then
    for file in "$@"; do [ -f "$name/$file" ] && echo "there $(sum "$name/$file") $file"; done
  fi
  (cd "$name" && find . ! -type d) | while IFS= read -r file; do echo "other ${file#./}"; done
elif [ -e "$name" ]; then echo file; exit
fi
if [ -L "$stage" ] || { [ -e "$stage" ] && [ ! -O "$stage" ]; }; then echo foreign; exit; fi
mkdir -p "$stage" || exit 1
if [ -f "$stage/.sender" ]; then
  read -r sender <"$stage/.sender"
  case $(readlink "/proc/$sender/fd/1") in */"$stage"/*)
    kill -9 "$sender"; turns=0
    while [ -e "/proc/$sender/fd/1" ] && [ $turns -lt 10000 ]; do turns=$((turns + 1)); done
  esac
  rm -f "$stage/.sender"
fi
(cd "$stage" && find . ! -type d) | while IFS= read -r file; do
  keep=; for one in "$@"; do [ "$file" = "./$one" ] && keep=yes; done
  if [ -z "$keep" ] || [ -L "$stage/$file" ]; then rm -f "$stage/$file"
  else echo "staged $(sum "$stage/$file") $(wc -c <"$stage/$file") ${file#./}"; fi
done
echo "free $(df -Pk "$stage" | tail -n 1 | tr -s ' ' | cut -d ' ' -f 4)"
if [ -f "$name/model.json" ]; then echo manifest; head -c 4194305 "$name/model.json"; fi
