# Completion of packtrain for fish. Put it into ~/.config/fish/completions/packtrain.fish

function __packtrain_complete
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local found ($words[1] completion fish -- $words[2..-1] (commandline --current-token --cut-at-cursor) 2> /dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline --current-token --cut-at-cursor)
    end
end

complete --command packtrain --no-files --arguments '(__packtrain_complete)'
