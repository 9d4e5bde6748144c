#compdef packtrain
# Completion of packtrain for zsh. Put it as _packtrain into a folder of $fpath, or source it after compinit.

_packtrain() {
    local line value
    local -a open closed open_texts closed_texts
    for line in "${(@f)$("${words[1]}" completion zsh -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2> /dev/null)}"; do
        value=${line%%$'\t'*}
        if [[ -z $value ]]; then
            continue
        elif [[ $value == *[=.] ]]; then  # more follows a field, so no space does
            open+=("$value") open_texts+=("${line/$'\t'/  }")
        else
            closed+=("$value") closed_texts+=("${line/$'\t'/  }")
        fi
    done
    if (( ! $#open && ! $#closed )); then
        _files
        return
    fi
    (( $#open )) && compadd -S '' -l -d open_texts -- "${open[@]}"
    (( $#closed )) && compadd -l -d closed_texts -- "${closed[@]}"
}

if [[ $funcstack[1] == _packtrain ]]; then
    _packtrain "$@"  # read from $fpath at the first use
else
    compdef _packtrain packtrain
fi
