
@add_from_path@
for python in "$@" "@environments@"/*/bin/python; do
  case $python in "~/"*) python=$HOME/${python#"~/"};; esac
  for module in @module@ packtrain.fleet.local; do
    "$python" -P -c "from $module import find_processes" 2>/dev/null && { echo "$python"; echo "$module"; exit 0; }
  done
done
for process in /proc/[0-9]*/cmdline; do tr '\0' ' ' < "$process"; echo; done 2>/dev/null |
  grep -q 'packtrain.* nod[e] ' || { echo none; echo none; exit 0; }
echo 'a node runs there, but packtrain is not installed; was its environment removed?' >&2; exit 1
