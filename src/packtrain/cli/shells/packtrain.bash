# Completion of packtrain for bash. Source it, or put it into ~/.local/share/bash-completion/completions/packtrain

_packtrain() {
    local line=${COMP_LINE:0:COMP_POINT} word cut= value
    local -a words
    read -ra words <<< "$line"
    word=${line##*[[:space:]]}
    [[ -n $word ]] || words+=("")
    # Bash takes what follows = or : for a word of its own, and replaces only that.
    [[ $word == *[=:]* && $COMP_WORDBREAKS == *=* ]] && cut=${word%"${word##*[=:]}"}
    COMPREPLY=()
    while IFS= read -r value; do
        COMPREPLY+=("${value#"$cut"}")
        # More follows a field, so no space does.
        [[ $value == *[=.] ]] && compopt -o nospace
    done < <("$1" completion bash -- "${words[@]:1}" 2> /dev/null)
}
# Where there is nothing to offer, files are.
complete -o bashdefault -o default -F _packtrain packtrain
